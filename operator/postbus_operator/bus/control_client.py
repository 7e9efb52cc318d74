"""The control API of one bus, as the operator calls it.

Every change carries the epoch of the operator's lease, so that a bus refuses a leader that was
replaced. Whether it was replaced is asked of the Lease, so that no bus can stop the operator: the
number that a bus has seen may be anything.

Address, token and authority are read again when the bus cannot be reached or refuses them: a Secret
that changes needs no restart.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from postbus.client.control import ControlClient, Failure, RequestFailed, RequestRefused
from postbus.contract.control import (
    EPOCH_HEADER,
    Applied,
    Deleted,
    DeletionPolicy,
    EntityChanges,
    EntityFacts,
    NamespaceDescription,
    ProblemType,
    QueueDescription,
    RuntimeInformation,
    Status,
    SubscriptionDescription,
    TopicDescription,
)
from postbus.contract.control_counts import EntityCountsPage
from postbus.contract.control_groups import CreateReaderGroup, OfReaderGroup, ReaderGroupList
from postbus_operator.bus.entity_paths import EntityPath
from postbus_operator.context import LeadershipLost, StillLeads
from postbus_operator.outcome import BackendUnavailable

M = TypeVar("M", bound=BaseModel)

PAGE: Final = 1_000
"""Entries in one answer; the most that a bus returns."""

MAX_ANSWER: Final = 8 * 1024 * 1024
"""Bytes of an answer. A page of 1,000 changes with the longest names and marks has 1.1 MB, and the
definition in a resource, which has 1.5 MiB at most, three times as much with escaped characters."""

DESCRIPTIONS: Final[dict[str, type[EntityFacts]]] = {
    "queue": QueueDescription,
    "topic": TopicDescription,
    "subscription": SubscriptionDescription,
}


@dataclass(frozen=True, slots=True)
class Access:
    """Address and credentials of a control API. `ca`: certificates (PEM); None: no TLS.

    `server_name`: the name in the certificate of a user, which knows no pods.
    """

    url: str
    token: str = field(repr=False)
    ca: str | None = None
    server_name: str | None = None


class BusControl:
    """A client that stays usable while credentials change.

    Methods raise `RequestRefused` for a refusal that another request may avoid,
    `BackendUnavailable` if the bus does not answer, and `LeadershipLost`.
    """

    def __init__(
        self,
        read_access: Callable[[], Awaitable[Access]],
        epoch: int,
        still_leads: StillLeads,
    ) -> None:
        """`read_access` may raise `BackendUnavailable`: the Secrets are not there yet."""
        self._read_access = read_access
        self._epoch = epoch
        self._still_leads = still_leads
        self._access: Access | None = None
        self._client: ControlClient | None = None
        self._open = AsyncExitStack()
        self._changing = asyncio.Lock()

    async def close(self) -> None:
        """Close all connections."""
        async with self._changing:
            self._client, self._access = None, None
            await self._open.aclose()

    # --- the bus --------------------------------------------------------------------------------

    async def status(self) -> Status:
        """Return the status of the broker."""
        return _read(Status, await self.ask("GET", "/v1/status"))

    async def description(self) -> NamespaceDescription:
        """Return the definition of the bus."""
        return _read(NamespaceDescription, await self.ask("GET", "/v1/namespace"))

    async def changes(self, since: int, begun: int, wait_s: int = 0) -> EntityChanges:
        """Return changes after a version; the list from 0 began at version `begun`."""
        query = {"since": since, "begun": begun, "wait": wait_s}
        return _read(EntityChanges, await self.ask("GET", "/v1/changes", query=query))

    async def counts(self, since: str) -> EntityCountsPage:
        """Return the counts that changed after a cursor."""
        query = {"since": since, "top": PAGE}
        return _read(EntityCountsPage, await self.ask("GET", "/v1/runtime", query=query))

    # --- entities -------------------------------------------------------------------------------

    async def describe(self, path: EntityPath) -> EntityFacts:
        """Return an entity with its definition."""
        return _read(DESCRIPTIONS[path.kind], await self.ask("GET", path.url))

    async def count(self, path: EntityPath) -> RuntimeInformation:
        """Return the counts of an entity."""
        return _read(RuntimeInformation, await self.ask("GET", f"{path.url}/runtime"))

    async def put(
        self, path: EntityPath, body: Mapping[str, object], mark: str, version: int | None
    ) -> Applied:
        """Create an entity (`version` None) or replace the definition that has this version."""
        answer = await self.ask(
            "PUT", path.url, body, {"managed-by": mark}, _condition(version, is_put=True)
        )
        return _read(Applied, answer)

    async def delete(self, path: EntityPath, policy: DeletionPolicy, version: int) -> Deleted:
        """Delete an entity that has this version."""
        answer = await self.ask(
            "DELETE", path.url, query={"policy": policy.value}, headers=_condition(version)
        )
        return _read(Deleted, answer)

    async def restore(self, entity_id: int) -> Applied:
        """Restore a deleted entity with its messages."""
        return _read(Applied, await self.ask("POST", f"/v1/deleted/{entity_id}/restore"))

    # --- reader groups --------------------------------------------------------------------------

    async def reader_groups(self) -> ReaderGroupList:
        """Return all reader groups, without those of partitions that are unavailable."""
        return _read(ReaderGroupList, await self.ask("GET", "/v1/reader-groups"))

    async def create_reader_group(self, group: CreateReaderGroup) -> None:
        """Create a reader group, or leave one that is there where it is."""
        await self.ask("POST", "/v1/reader-groups/create", _body(group))

    async def delete_reader_group(self, group: OfReaderGroup) -> None:
        """Delete a reader group: what it kept goes, what it held off may be received."""
        await self.ask("POST", "/v1/reader-groups/delete", _body(group))

    # --- requests -------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request; once more with fresh credentials if the bus refuses those in use."""
        try:
            return await self._ask(method, path, body, query, headers)
        except _Unauthorized:
            await self._renew()
        try:
            return await self._ask(method, path, body, query, headers)
        except _Unauthorized as error:
            raise BackendUnavailable(f"the control API refuses the operator: {error}") from None

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        query: Mapping[str, object] | None,
        headers: Mapping[str, str] | None,
    ) -> Any:
        client = await self._connected()
        sent = dict(headers or {})
        if method != "GET":
            sent[EPOCH_HEADER] = str(self._epoch)
            body = body or {} if method == "POST" else body
        try:
            return await client.ask(method, path, body, query, sent)
        except RequestFailed as error:
            if error.failure in (Failure.CERTIFICATE_UNTRUSTED, Failure.NO_TLS):
                raise _Unauthorized(str(error)) from None
            self._access = None if error.failure is Failure.NO_CONNECTION else self._access
            raise BackendUnavailable(f"the control API: {error}") from None
        except RequestRefused as error:
            if error.type is ProblemType.CALLER_TOO_OLD:
                raise await self._of_too_old(error.detail) from None
            if error.status == 401:
                raise _Unauthorized(error.detail) from None
            if error.status in (429, 502, 503, 504):
                raise BackendUnavailable(error.detail) from None
            raise

    async def _of_too_old(self, detail: str) -> Exception:
        """Return the meaning of `caller-too-old`: only the Lease says who leads, not a bus."""
        if not await self._still_leads():
            return LeadershipLost(f"a broker has seen a newer leader: {detail}")
        return BackendUnavailable(
            f"the bus refuses changes of this operator, which leads: {detail}. Another operator"
            " has changed it, or its database comes from another cluster; if that operator no"
            " longer does, somebody with the control token resets the number with DELETE"
            " /v1/caller-epoch (control-api.md, Fencing of callers)"
        )

    async def _connected(self) -> ControlClient:
        async with self._changing:
            if self._access is None:
                await self._open.aclose()
                await self._connect(await self._read_access())
            assert self._client is not None
            return self._client

    async def _renew(self) -> None:
        """Read the credentials again; connections are kept if they are the same."""
        async with self._changing:
            access = await self._read_access()
            if access != self._access:
                await self._open.aclose()
                await self._connect(access)

    async def _connect(self, access: Access) -> None:
        trusted = None
        if access.ca is not None:
            trusted = ssl.create_default_context(cadata=access.ca)
            # A certificate of a user may come without its authority.
            trusted.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client = ControlClient(access.url, access.token, trusted, access.server_name, MAX_ANSWER)
        self._client = await self._open.enter_async_context(client)
        self._access = access


class _Unauthorized(Exception):
    """The bus does not accept the credentials, or its certificate is of another authority."""


def _read(model: type[M], answer: object) -> M:
    """Return an answer; a broker of another version may give one that this one cannot read."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(each) for each in problem["loc"])
        raise BackendUnavailable(
            f"the operator cannot read the answer of the bus ({field}: {problem['msg']}): run"
            " brokers and operator of one version"
        ) from None


def _body(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _condition(version: int | None, *, is_put: bool = False) -> dict[str, str]:
    if version is None:
        return {"If-None-Match": "*"} if is_put else {}
    return {"If-Match": f'"{version}"'}
