"""Control API of the namespace as a whole: definition, broker status, changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from postbus import __version__
from postbus.broker.access.caller_fence import CallerFence
from postbus.broker.administration import Administration, NamespaceNotEmpty
from postbus.broker.operate.readiness import Readiness
from postbus.broker.partition.host import Host
from postbus.contract.control import (
    Applied,
    ConnectionDescription,
    ConnectionPage,
    EntityTotals,
    FieldProblem,
    NamespaceDescription,
    PartitionStatus,
    ProblemType,
    Status,
    applied_hash,
)
from postbus.contract.entities import EntityKind
from postbus.contract.namespace import NamespaceDefinition
from postbus.edge.control.calls import Answer, Call, ControlRefused, Handler, answering_if_match
from postbus.edge.control.openapi import openapi_text

NAMESPACE_ID = 0
"""The namespace is not an entity; entities count from 1."""

Connections: TypeAlias = Callable[[int, int], tuple[list[ConnectionDescription], int]]
"""Describes a number of clients from an offset on, and returns their total."""


class ControlStatus:
    """Handlers of operations that are not about one entity."""

    def __init__(
        self,
        administration: Administration,
        hosts: Sequence[Host],
        fence: CallerFence,
        readiness: Readiness,
        *,
        connections: Connections,
        broker_name: str,
        is_development: bool,
    ) -> None:
        self._administration = administration
        self._hosts = hosts
        self._fence = fence
        self._readiness = readiness
        self._connections = connections
        self._broker_name = broker_name
        self._is_development = is_development

    def operations(self) -> Mapping[str, Handler]:
        return {
            "getNamespace": self._namespace,
            "putNamespace": self._put_namespace,
            "closeNamespace": self._close_namespace,
            "openNamespace": self._open_namespace,
            "getStatus": self._status,
            "listConnections": self._list_connections,
            "forgetCallerEpoch": self._forget_epoch,
            "getOpenApi": self._openapi,
        }

    # --- namespace ------------------------------------------------------------------------------

    async def _namespace(self, _call: Call) -> Answer:
        return self._described()

    async def _close_namespace(self, _call: Call) -> Answer:
        try:
            await self._administration.close_namespace()
        except NamespaceNotEmpty as error:
            problems = [
                FieldProblem(field=each.name, problem=f"holds messages: {each.message_count}")
                for each in error.first
            ]
            detail = f"{error}; messages are accepted again"
            raise ControlRefused(409, detail, ProblemType.NOT_EMPTY, problems) from error
        return self._described()

    async def _open_namespace(self, _call: Call) -> Answer:
        await self._administration.open_namespace()
        return self._described()

    def _described(self) -> Answer:
        administration = self._administration
        described = NamespaceDescription(
            name=administration.namespace,
            version=administration.version,
            partition_count=len(self._hosts),
            is_closed=administration.is_closed,
            entities=EntityTotals(
                queues=administration.count_of(EntityKind.QUEUE),
                topics=administration.count_of(EntityKind.TOPIC),
                subscriptions=administration.count_of(EntityKind.SUBSCRIPTION),
                unmanaged=administration.unmanaged_count,
            ),
            applied_hash=applied_hash(administration.properties),
            properties=administration.properties,
        )
        return Answer(described, etag=administration.version)

    async def _put_namespace(self, call: Call) -> Answer:
        """Change the properties that can be changed while the broker runs."""
        administration = self._administration
        wanted, condition = call.read(NamespaceDefinition), call.condition
        with answering_if_match("the catalog", condition.mode, advice="read it again"):
            version = await administration.put_namespace(wanted, condition)
        applied = Applied(
            entity_id=NAMESPACE_ID,
            applied_hash=applied_hash(administration.properties),
            version=version,
            acknowledged=administration.acknowledged(),
            created=False,
        )
        return Answer(applied, etag=version)

    # --- the broker -----------------------------------------------------------------------------

    async def _status(self, _call: Call) -> Answer:
        return Answer(await self._shown())

    async def _list_connections(self, call: Call) -> Answer:
        skip, top = call.number("skip"), call.number("top")
        items, count = self._connections(skip, top)
        following = skip + len(items)
        next_skip = following if items and following < count else None
        return Answer(ConnectionPage(items=items, next_skip=next_skip))

    async def _forget_epoch(self, _call: Call) -> Answer:
        await self._fence.forget()
        return Answer(await self._shown())

    async def _openapi(self, _call: Call) -> Answer:
        return Answer(text=openapi_text())

    async def _shown(self) -> Status:
        administration = self._administration
        is_ready = await self._readiness.is_ready()
        acknowledged = administration.acknowledged()
        partitions = [
            PartitionStatus(
                partition=host.partition_id,
                status=host.status.value,
                version=acknowledged.get(host.partition_id),
                epoch=host.epoch,
                schema_version=None if host.epoch is None else host.schema_version,
                reload_count=host.reload_count,
                trouble=host.trouble,
            )
            for host in self._hosts
        ]
        return Status(
            program_version=__version__,
            namespace=administration.namespace,
            broker=self._broker_name,
            is_ready=is_ready,
            is_development=self._is_development,
            version=administration.version,
            highest_caller_epoch=self._fence.highest,
            partitions=partitions,
            troubles=self._readiness.troubles(),
        )
