"""Takes what the watches hear into the cache, and wakes those whom it concerns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from postbus_operator.kube.cache import Cache, Change
from postbus_operator.kube.waking import ChildName, concerned, has_other_status, is_own_write
from postbus_operator.kube.watches import Watch, Watches, page_of
from postbus_operator.objects import Key, Resource


class Wake(Protocol):
    """Has a resource looked at."""

    def __call__(self, key: Key, delay_s: float = 0.0) -> None:
        """Have it looked at after a delay."""


class Observer:
    """The one consumer of lists, events and answers to own writes."""

    def __init__(
        self,
        cache: Cache,
        watches: Watches,
        *,
        wake: Wake,
        is_running: Callable[[Key], bool],
        on_complete: Callable[[], None],
        child_name: ChildName,
        now: Callable[[], float],
    ) -> None:
        """`is_running`: whether a resource is being looked at.

        `on_complete`: called when all lists are complete.
        """
        self._cache = cache
        self._watches = watches
        self._wake = wake
        self._is_running = is_running
        self._on_complete = on_complete
        self._child_name = child_name
        self._now = now

    def watch_at(self, path: str) -> Watch | None:
        """Return the watch whose requests have a path."""
        return self._watches.at(path)

    def heard(self, watch: Watch) -> None:
        """Note that a stream has begun, or brought data, bookmarks included."""
        self._watches.heard(watch, self._now())

    def listed(self, watch: Watch, query: Mapping[str, str], answer: Mapping[str, Any]) -> None:
        """Take a page of a list; after the last one, drop what the list lacks.

        A watch that is interrupted for long begins with a list: it does not tell what went.
        """
        self.heard(watch)
        for item in answer["items"]:
            item.setdefault("apiVersion", watch.type.api_version)
            item.setdefault("kind", watch.type.kind)
            self._consider(self._cache.observe(item))
        page = page_of(watch, query, answer)
        whole = self._watches.page(watch, page)
        if whole is not None:
            for key in self._cache.keys_of(watch.type, watch.namespace):
                if key not in whole:
                    self._consider(self._cache.drop(key, page.version))
            if self._watches.is_complete:
                self._on_complete()

    def event(self, type: str | None, found: Mapping[str, Any]) -> None:
        """Take an event of a watch: ADDED, MODIFIED or DELETED with the object."""
        if type == "DELETED":
            self._consider(self._cache.forget(found))
        else:
            self._consider(self._cache.observe(found))

    def written(self, found: Mapping[str, Any]) -> None:
        """Take what an own write has made; the writer knows it already.

        The answer shows, too, what others have changed since the cache heard of the object. Their
        event is then older than what is known here and wakes nobody any more.
        """
        change = self._cache.observe(found)
        if change is None:
            return
        own = _key_of(change)
        if own is not None:
            known = {own} if is_own_write(change) or change.before is None else set()
            woken = concerned(self._cache, change, self._child_name) - known
        elif has_other_status(change):
            woken = concerned(self._cache, change, self._child_name)
        else:
            woken = set()
        for key in woken:
            self._wake(key)

    def _consider(self, change: Change | None) -> None:
        if change is None:
            return
        woken = concerned(self._cache, change, self._child_name)
        own = _key_of(change)
        if own is not None and is_own_write(change) and self._is_running(own):
            # The event came before the answer to the write that is on its way.
            woken.discard(own)
        for key in woken:
            self._wake(key)


def _key_of(change: Change) -> Key | None:
    some = change.after or change.before
    return some.key if isinstance(some, Resource) else None
