"""kopf, configured to watch and to write nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import kopf

from postbus_operator.kube.api import PAGE, REQUEST_S
from postbus_operator.kube.watches import watched_types

UNUSED_FINALIZER: Final = "postbus.dev/unused-by-kopf"
"""kopf removes a finalizer of this name from any object it sees: it must not be the operator's."""

RECONNECT_S: Final = 300
"""Seconds after which the API server ends a watch, which then continues: a second belt."""

CONNECT_S: Final = 10.0

RETRIES_S: Final = (1, 1, 2, 3, 5, 8)
"""Pauses before attempts after a refusal or without an answer. Without an API server the Lease is
lost before they end; a missing right ends the process."""

IDLE_S: Final = 0.5
"""Seconds that kopf keeps the task of an object without events."""


def kopf_settings(*, is_cluster_wide: bool) -> kopf.OperatorSettings:
    """Return the settings of kopf."""
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.peering.standalone = True
    # Definitions are there before the start, and namespaces are named: nothing is to be found.
    settings.scanning.disabled = True
    # No limit of workers: each keeps its place for `idle_timeout` after an event (ADR 40).
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = IDLE_S
    settings.networking.request_timeout = REQUEST_S
    settings.networking.connect_timeout = CONNECT_S
    settings.networking.error_backoffs = RETRIES_S
    settings.watching.connect_timeout = CONNECT_S
    settings.watching.server_timeout = RECONNECT_S
    settings.watching.chunk_size = PAGE
    settings.persistence.finalizer = UNUSED_FINALIZER
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()
    for type, labels in watched_types(is_cluster_wide=is_cluster_wide).items():
        if labels:
            settings.watching.label_selectors[type.group, type.version, type.plural] = labels
    return settings


class NoDiffBase(kopf.DiffBaseStorage):
    """Keeps no last state: differences are of no use to level-triggered work."""

    def build(
        self,
        *,
        body: kopf.Body,  # noqa: ARG002
        extra_fields: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> Any:
        """Return an empty state; kopf's own is a deep copy of each object."""
        return {}

    def fetch(self, *, body: kopf.Body) -> None:
        """Return none."""

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: Any) -> NoReturn:
        """Refuse to write."""
        raise NotImplementedError("kopf only watches")


class NoProgress(kopf.ProgressStorage):
    """Keeps no progress of handlers: none of them is repeated."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        """Return none."""

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> NoReturn:
        """Refuse to write."""
        raise NotImplementedError("kopf only watches")

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Do nothing: nothing was written."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Do nothing: it would be a write."""

    def clear(self, *, essence: Any) -> Any:
        """Return the state as it is."""
        return essence
