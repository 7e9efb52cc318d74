"""Applies manifests to the catalog: at a start, or after this broker has claimed partition 0.

Only entities are applied here; entities that manifests do not name stay as they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from postbus.assembly.declared_keys import DeclaredKeys
from postbus.broker.access.authz import KeyRule
from postbus.broker.administration import (
    Administration,
    EntityDescription,
    WantedEntity,
)
from postbus.broker.audit import DONE, Audit, AuditedChange, outcome_of
from postbus.broker.catalog.catalog import Catalog
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.contract.checks import PlainDefinition, complete, in_order_of_forwarding
from postbus.contract.entities import (
    EntityKind,
    EntityProperties,
    TopicProperties,
)
from postbus.entity.commands import Refusal, Refused
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectoryError
from postbus.store.errors import StoreError

logger = logging.getLogger(__name__)

MANIFESTS: Final = "manifests"
START: Final = "start"
"""Caller and origin of these changes in the audit."""

MAX_ENTRY: Final = 2**63 - 1
OWN_LOOK_S: Final = 0.5
"""Interval at which a broker with waiting manifests checks whether it owns partition 0."""


class Defining:
    """The entities of a bus's manifests: applied by the owner of partition 0, otherwise later."""

    def __init__(
        self,
        declared: DeclaredKeys,
        administration: Administration,
        catalog: Catalog,
        audit: Audit,
    ) -> None:
        """`declared` has the current manifests when they are applied."""
        self._declared = declared
        self._administration = administration
        self._catalog = catalog
        self._audit = audit
        self._turn = asyncio.Lock()
        self._is_due = asyncio.Event()

    async def define(self, definition: BusDefinition, rules: Sequence[KeyRule]) -> None:
        """Apply manifests now if this broker owns partition 0; otherwise log its owner and postpone
        them.

        Raises `DirectoryRefusal`; manifests that were postponed before stay so.
        """
        async with self._turn:
            try:
                await self._catalog.own()
            except DirectoryRefusal as refusal:
                self.postpone(refusal)
                return
            await define_entities(definition, self._administration, rules, self._audit)
            self._is_due.clear()

    def postpone(self, why: DirectoryRefusal) -> None:
        """Apply the manifests as soon as this broker owns partition 0 and its store answers."""
        logger.warning(
            "manifests are not applied yet: the owner of partition 0 changes entities",
            extra={"why": str(why)},
        )
        self._is_due.set()

    async def keep_defining(self) -> None:
        """Apply waiting manifests as soon as partition 0 is owned; log refusals."""
        while True:
            await self._is_due.wait()
            await asyncio.sleep(OWN_LOOK_S)
            async with self._turn:
                if self._catalog.epoch is not None and self._is_due.is_set():
                    await self._define_due()

    async def _define_due(self) -> None:
        self._is_due.clear()
        try:
            rules = await asyncio.to_thread(self._declared.rules)
            await define_entities(
                self._declared.definition, self._administration, rules, self._audit
            )
        except DirectoryRefusal as refusal:
            if refusal.refused.refusal is Refusal.NOT_APPLIED:
                self._is_due.set()
                return
            logger.error("manifests could not be applied", extra={"why": str(refusal)})
        except DataDirectoryError as error:
            logger.error("manifests could not be applied", extra={"why": str(error)})


async def define_entities(
    definition: BusDefinition,
    administration: Administration,
    rules: Sequence[KeyRule],
    audit: Audit,
) -> None:
    """Change the tier to that of the manifests, then create or change their entities.

    `rules`: the authorization rules that they declare, for the audit. Raises `DirectoryRefusal`.
    """
    await _declare_sku(definition, administration, audit)
    wanted = _wanted_of(definition, administration)
    before = administration.version
    differing = [
        AuditedChange(MANIFESTS, "", START, "put", path, {})
        for path, each in wanted.items()
        if _differs(administration.find(path), each)
    ]
    try:
        entries = await audit.begin_all(differing)
    except StoreError as error:
        refused = Refused(Refusal.NOT_APPLIED, f"the store is unavailable: {error}")
        raise DirectoryRefusal(refused) from error
    try:
        await _define(wanted, administration)
    except DirectoryRefusal as error:
        for entry in entries:
            audit.end(entry, outcome_of(error))
        raise
    for entry in entries:
        put = administration.find(entry.change.entity)
        is_changed = put is not None and put.version > before
        audit.end(entry, DONE if is_changed else None)
    await _note_rules(rules, audit)


async def _declare_sku(
    definition: BusDefinition, administration: Administration, audit: Audit
) -> None:
    wanted = definition.properties.declared_sku
    if wanted is not None and wanted is not administration.properties.sku.name:
        change = AuditedChange(MANIFESTS, "", START, "put namespace", "", {"sku": wanted.value})
        await audit.recorded(change, administration.declare_sku(wanted))


def _differs(known: EntityDescription | None, wanted: WantedEntity) -> bool:
    """Return whether a definition may change something; the catalog decides."""
    if known is None or known.properties != wanted.properties:
        return True
    return wanted.rules is not None and [each.properties for each in known.rules] != list(
        wanted.rules
    )


async def _note_rules(rules: Sequence[KeyRule], audit: Audit) -> None:
    """Record the authorization rules of the manifests in the audit if they have changed.

    Earlier rules are known by a salted digest, from which no key can be derived. Raises
    `DirectoryRefusal` while the store is unavailable.
    """
    last = await audit.page(MAX_ENTRY, 1, "", MANIFESTS)
    known = last[0].change.detail if last else {}
    salt = str(known.get("salt", secrets.token_hex(16)))
    said = sorted(
        (rule.scope or "", rule.name, *sorted(right.value for right in rule.rights),
         rule.keys.primary, rule.keys.secondary or "")
        for rule in rules
    )  # fmt: skip
    text = json.dumps(said).encode()
    digest = hashlib.scrypt(text, salt=salt.encode(), n=2**14, r=8, p=1).hex()
    if digest != known.get("digest"):
        names = [f"{rule.scope}/{rule.name}" if rule.scope else rule.name for rule in rules]
        detail = {"rules": sorted(names), "salt": salt, "digest": digest}
        change = AuditedChange(MANIFESTS, "", START, "declare authorization rules", "", detail)
        await audit.recorded(change, asyncio.sleep(0))


async def _define(wanted: dict[str, WantedEntity], administration: Administration) -> None:
    """Put all definitions.

    New entities are created first and without forwarding, since a target must exist; then all get
    their definitions, targets before entities that forward to them.
    """
    described = [PlainDefinition(name, each.kind, each.properties) for name, each in wanted.items()]
    new = [
        replace(each, properties=_forwarding_nowhere(each.properties))
        for name, each in wanted.items()
        if administration.find(name) is None
    ]
    await administration.put_all(new)
    await administration.put_all([wanted[one.name] for one in in_order_of_forwarding(described)])


def _wanted_of(
    definition: BusDefinition, administration: Administration
) -> dict[str, WantedEntity]:
    """Return the entities of the manifests by path, topics before their subscriptions.

    Fields that they leave out have the defaults of the tier that the namespace has.
    """
    wanted = [
        WantedEntity(EntityKind.TOPIC, each.name, each.properties) for each in definition.topics
    ]
    wanted += [
        WantedEntity(EntityKind.SUBSCRIPTION, each.name, each.properties, each.topic, each.rules)
        for each in definition.subscriptions
    ]
    wanted += [
        WantedEntity(EntityKind.QUEUE, each.name, each.properties) for each in definition.queues
    ]
    return {each.path: _completed(each, administration) for each in wanted}


def _completed(wanted: WantedEntity, administration: Administration) -> WantedEntity:
    found = administration.find(wanted.path)
    known = None if found is None else found.properties
    return replace(wanted, properties=complete(wanted.properties, administration.limits, known))


def _forwarding_nowhere(properties: EntityProperties) -> EntityProperties:
    if isinstance(properties, TopicProperties):
        return properties
    return properties.model_copy(update=NOWHERE)


NOWHERE: Final = {"forward_to": None, "forward_dead_lettered_messages_to": None}
