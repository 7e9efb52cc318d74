"""Brings what manifests say into the catalog: at a start, or when partition 0 becomes ours.

Only entities are meant here; what manifests do not name stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from postbus.broker.administration import (
    Administration,
    AdministrationRefused,
    WantedEntity,
)
from postbus.broker.catalog import Catalog
from postbus.contract import (
    EntityKind,
    EntityProperties,
    TopicProperties,
    subscription_path,
)
from postbus.definitions import Described, in_order_of_forwarding
from postbus.manifests import BusDefinition

logger = logging.getLogger(__name__)

OWN_LOOK_S: Final = 0.5
"""How often a broker whose manifests wait looks whether partition 0 is its own by now."""


async def define_entities(definition: BusDefinition, administration: Administration) -> None:
    """Create or change what the manifests say; what they do not say stays.

    What is new is made first and forwards nowhere yet, since a target must exist; then all get
    their definitions, targets before what forwards to them. Raises `AdministrationRefused`.
    """
    wanted = _wanted_of(definition)
    described = [Described(name, each.kind, each.properties) for name, each in wanted.items()]
    new = [
        replace(each, properties=_forwarding_nowhere(each.properties))
        for name, each in wanted.items()
        if administration.find(name) is None
    ]
    await administration.put_all(new)
    await administration.put_all([wanted[one.name] for one in in_order_of_forwarding(described)])


async def define_later(
    definition: BusDefinition, administration: Administration, catalog: Catalog
) -> None:
    """Do it once, when partition 0 has become ours; what is refused then is logged."""
    while True:
        await asyncio.sleep(OWN_LOOK_S)
        if catalog.epoch is None:
            continue
        try:
            await define_entities(definition, administration)
        except AdministrationRefused as refusal:
            if catalog.epoch is None:
                continue
            logger.error("manifests could not be applied", extra={"why": str(refusal)})
        return


def _wanted_of(definition: BusDefinition) -> dict[str, WantedEntity]:
    """Return what manifests want by its path, topics before their subscriptions."""
    topics = [
        WantedEntity(EntityKind.TOPIC, each.name, each.properties) for each in definition.topics
    ]
    queues = [
        WantedEntity(EntityKind.QUEUE, each.name, each.properties) for each in definition.queues
    ]
    kind = EntityKind.SUBSCRIPTION
    return {
        **{each.name: each for each in topics},
        **{
            subscription_path(each.topic, each.name): WantedEntity(
                kind, each.name, each.properties, each.topic, each.rules
            )
            for each in definition.subscriptions
        },
        **{each.name: each for each in queues},
    }


def _forwarding_nowhere(properties: EntityProperties) -> EntityProperties:
    if isinstance(properties, TopicProperties):
        return properties
    return properties.model_copy(update=NOWHERE)


NOWHERE: Final = {"forward_to": None, "forward_dead_lettered_messages_to": None}
