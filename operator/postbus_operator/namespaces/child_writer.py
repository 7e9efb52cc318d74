"""Writes objects of a bus, those that differ only; refusals become troubles of the look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from postbus_operator.annotations import BUS_LABEL
from postbus_operator.children.bus import Bus, Json
from postbus_operator.children.comparison import is_current, with_digest
from postbus_operator.context import Context
from postbus_operator.kube.api import ApiError, ApiUnavailable, Conflict, Forbidden, NotFound
from postbus_operator.kube.resource_types import ResourceType, type_of
from postbus_operator.kube.slimming import slim
from postbus_operator.namespaces.status import Look, Subject, Trouble

FORBIDDEN: Final = (
    "give the operator this right (install its chart again), or change the quota or policy that"
    " refuses"
)
"""What to do about an answer 403, which admission gives, too."""


class ChildWriter:
    """Writes for one look; `is_observing`: only notes what differs."""

    def __init__(self, context: Context, bus: Bus, look: Look, *, is_observing: bool) -> None:
        self._context = context
        self._bus = bus
        self._look = look
        self._is_observing = is_observing

    async def put(
        self, wanted: Json, subject: Subject = "objects", *, adopts: bool = False
    ) -> bool:
        """Apply an object unless it is as wanted; return whether it is now.

        An object of this name that is not of the bus is left alone, unless `adopts`: a Secret that
        a person has restored.
        """
        wanted = with_digest(wanted)
        type, name = type_of(wanted), wanted["metadata"]["name"]
        observed = self._context.cache.find(type, self._bus.key.namespace, name)
        if observed is None:
            try:
                observed = await self._read(type, name)
            except Forbidden as error:
                self._refused(subject, type, name, error)
                return False
        if observed is not None:
            if is_current(observed, wanted):
                return True
            if not adopts and not self._is_own(observed):
                self._add(
                    subject,
                    "NameTaken",
                    f"{type.kind} {name} exists and is not of this bus: rename or delete it",
                )
                return False
        if self._is_observing:
            self._look.differing.append(f"{type.kind} {name}")
            return observed is not None
        try:
            await self._context.api.apply(wanted)
        except ApiError as error:
            self._refused(subject, type, name, error)
            return False
        return True

    async def create(self, wanted: Json) -> bool:
        """Create an object that nobody may have made meanwhile, as its content is kept for life."""
        wanted = with_digest(wanted)
        type, name = type_of(wanted), wanted["metadata"]["name"]
        if self._is_observing:
            self._look.differing.append(f"{type.kind} {name}")
            return False
        try:
            await self._context.api.create(type, self._bus.key.namespace, wanted)
        except ApiError as error:
            self._refused("secrets", type, name, error)
            return False
        return True

    async def patch(
        self, type: ResourceType, name: str, change: Json, subject: Subject, advice: str
    ) -> None:
        """Change fields of an object that others made, such as a volume claim."""
        if self._is_observing:
            self._look.differing.append(f"{type.kind} {name}")
            return
        try:
            await self._context.api.patch(type, self._bus.key.namespace, name, change)
        except ApiError as error:
            self._refused(subject, type, name, error, advice)

    async def remove(self, type: ResourceType, name: str) -> None:
        """Delete an object of the bus that is no longer wanted."""
        observed = self._context.cache.find(type, self._bus.key.namespace, name)
        if observed is None or not self._is_own(observed):
            return
        if self._is_observing:
            self._look.differing.append(f"{type.kind} {name}")
            return
        uid = observed["metadata"]["uid"]
        try:
            await self._context.api.delete(type, self._bus.key.namespace, name, uid=uid)
        except ApiError as error:
            self._refused("objects", type, name, error)

    async def _read(self, type: ResourceType, name: str) -> Mapping[str, Any] | None:
        try:
            return slim(await self._context.api.get(type, self._bus.key.namespace, name))
        except NotFound:
            return None

    def _is_own(self, observed: Mapping[str, Any]) -> bool:
        labels: Mapping[str, str] = observed["metadata"].get("labels") or {}
        return labels.get(BUS_LABEL) == self._bus.name

    def _refused(
        self, subject: Subject, type: ResourceType, name: str, error: ApiError, advice: str = ""
    ) -> None:
        """Note a refusal that repeating does not change; raise the others."""
        is_unknown_field = "field not declared in schema" in error.message
        if isinstance(error, ApiUnavailable | Conflict) and not is_unknown_field:
            raise error
        text = f"{type.kind} {name}: {error.message}"
        reason = "InvalidSpec"
        if isinstance(error, Forbidden):
            reason, advice = "Forbidden", advice or FORBIDDEN
        elif isinstance(error, NotFound):
            reason, advice = "NotInstalled", f"install what defines {type.api_version}"
        elif "updates to statefulset spec" in error.message:
            reason = "ImmutableFieldChanged"
        self._add(subject, reason, f"{text.strip()}: {advice}" if advice else text)

    def _add(self, subject: Subject, reason: str, message: str) -> None:
        self._look.troubles.append(Trouble(subject, reason, message, is_stalled=True))
