"""State of the watches: which lists are complete, and when each watch last heard something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from postbus_operator.annotations import FIELD_MANAGER, MANAGED_BY_LABEL, WATCH_LABEL
from postbus_operator.kube.cache import ObjectKey
from postbus_operator.kube.resource_types import (
    CHILDREN,
    CLUSTER_NAMESPACES,
    RESOURCES,
    SECRETS,
    ResourceType,
)


class Watch(NamedTuple):
    """One stream of the API server: objects of a type in a namespace, None: in all of them."""

    type: ResourceType
    namespace: str | None

    def __str__(self) -> str:
        place = "" if self.namespace is None else f" in {self.namespace}"
        return f"{self.type.plural}{place}"


def watched_types(*, is_cluster_wide: bool) -> dict[ResourceType, str]:
    """Return the watched types with their label selectors, which the API server applies.

    Labels of the cluster's namespaces need rights in the whole cluster; a Namespace that selects
    by them admits none without.
    """
    own = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"
    types = dict.fromkeys(RESOURCES.values(), "") | dict.fromkeys(CHILDREN, own)
    types[SECRETS] = f"{WATCH_LABEL}=true"
    if is_cluster_wide:
        types[CLUSTER_NAMESPACES] = ""
    return types


def watches_of(namespaces: Iterable[str]) -> list[Watch]:
    """Return all watches of an operator for these namespaces; none given: for the cluster."""
    places: list[str | None] = [*namespaces] or [None]
    types = watched_types(is_cluster_wide=places == [None])
    return [Watch(type, place) for type in types for place in places]


@dataclass(slots=True)
class _State:
    heard_at: float
    is_listed: bool = False
    listed: set[ObjectKey] = field(default_factory=set)


class Page(NamedTuple):
    """A part of a list. `version` is that of the whole list."""

    keys: list[ObjectKey]
    version: int
    is_first: bool
    is_last: bool


class Watches:
    """What has been heard, by watch. The time is an argument."""

    def __init__(self, watches: Iterable[Watch], now: float) -> None:
        self._states = {each: _State(now) for each in watches}
        self._by_path = {each.type.path(each.namespace): each for each in self._states}

    def at(self, path: str) -> Watch | None:
        """Return the watch whose requests have a path."""
        return self._by_path.get(path)

    def heard(self, watch: Watch, now: float) -> None:
        """Note a sign of life: an event, a bookmark, a list, a new connection."""
        self._states[watch].heard_at = now

    def page(self, watch: Watch, page: Page) -> set[ObjectKey] | None:
        """Add a part of a list; with the last one return all that the list has."""
        state = self._states[watch]
        if page.is_first:
            state.listed = set()
        state.listed.update(page.keys)
        if not page.is_last:
            return None
        whole, state.listed = state.listed, set()
        state.is_listed = True
        return whole

    @property
    def is_complete(self) -> bool:
        """Whether each list was read once: only then is what the cache lacks not there."""
        return all(each.is_listed for each in self._states.values())

    @property
    def unlisted(self) -> list[Watch]:
        """The watches whose first list is not complete."""
        return [watch for watch, state in self._states.items() if not state.is_listed]

    def ages(self, now: float) -> dict[Watch, float]:
        """Return the seconds since each watch last heard something."""
        return {watch: now - state.heard_at for watch, state in self._states.items()}


def page_of(watch: Watch, query: Mapping[str, str], answer: Mapping[str, Any]) -> Page:
    """Return what an answer to a list has."""
    metadata = answer["metadata"]
    return Page(
        keys=[
            ObjectKey(watch.type, item["metadata"].get("namespace", ""), item["metadata"]["name"])
            for item in answer["items"]
        ],
        version=int(metadata["resourceVersion"]),
        is_first="continue" not in query,
        is_last=not metadata.get("continue"),
    )
