"""All that a look at an entity reads which is on its bus as the resource says. Pure.

While these are the same, another look decides the same, and the resync needs none. Whatever such a
look reads besides belongs here; `tests/operator/test_inputs.py` notices what is missing.
"""

from __future__ import annotations

from typing import TypeAlias

from postbus_operator.bus.session import BusSession
from postbus_operator.context import Buses
from postbus_operator.entities.definitions import path_of, targets_of
from postbus_operator.entities.owners import Owner, owner_of
from postbus_operator.keys.sync import has_keys
from postbus_operator.kube.cache import Cache
from postbus_operator.objects import Key, Resource

Inputs: TypeAlias = tuple[object, ...]


def is_current(cache: Cache, buses: Buses, key: Key, inputs: Inputs) -> bool:
    """Return whether a look would read what one has read before, and so decide the same."""
    resource = cache.get(key)
    if resource is None:
        return False
    owner = owner_of(resource, cache.get, cache.labels_of_namespace)
    if not isinstance(owner, Owner):
        return False
    session: BusSession | None = buses.answering(owner.bus)
    return session is not None and inputs_of(cache, session, resource, owner) == inputs


def inputs_of(cache: Cache, session: BusSession, resource: Resource, owner: Owner) -> Inputs | None:
    """Return what a look reads; None: only a look can tell.

    That is so for what is rare, or asked with a request: a claim of another resource, an entity
    that is not there, keys. Each version of an object is another value.
    """
    if has_keys(cache, resource) or len(cache.claimants(resource)) > 1:
        return None
    topic = owner.direct.entity_name if resource.key.kind == "Subscription" else ""
    path, find = path_of(resource, topic), session.view.find
    live = find(path.name)
    if live is None:
        return None
    return (
        resource,
        owner,
        session,
        live,
        find(topic),
        session.counts_of(live.entity_id),
        session.view.subscription_count(path.name),
        tuple(
            (find(target), cache.named(owner.bus.key, target))
            for target in targets_of(resource).values()
        ),
    )
