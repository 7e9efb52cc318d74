"""The cluster of KUBECONFIG, with many requests at once: objects go in, a watch tells what became.

The asyncio half of the client, as in the operator: kubectl starts a process for each request, and
10,000 of them take longer than what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

from kubernetes.aio.client import ApiClient

from postbus_operator.kube.api import Api, ApiError, Conflict, NotFound
from postbus_operator.kube.connection import api_client, load_configuration
from postbus_operator.kube.resource_types import CLUSTER_NAMESPACES, ResourceType, type_of

Json = dict[str, Any]
T = TypeVar("T")

AT_ONCE: Final = 16
"""Requests at once: more of them only wait in the API server, on two cores."""

TOO_EARLY: Final = 429
"""Answer to a watch of a type that the API server has just learnt."""

SHOW_S: Final = 5.0
PAUSE_S: Final = 0.25


def say(text: str) -> None:
    """Write a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Cluster:
    """Requests to the API server, at most `AT_ONCE` of them at the same time."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._places = asyncio.Semaphore(AT_ONCE)
        self.api = Api(client, on_answer=lambda *_: None, on_object=lambda _: None)

    async def create(self, wanted: Json) -> None:
        """Create an object, unless it exists."""
        metadata = wanted["metadata"]
        async with self._places:
            with suppress(Conflict):
                await self.api.create(type_of(wanted), metadata.get("namespace"), wanted)

    async def apply(self, wanted: Json) -> None:
        """Apply an object on the server's side, as somebody who is not the operator."""
        metadata = wanted["metadata"]
        path = type_of(wanted).path(metadata.get("namespace"), metadata["name"])
        async with self._places:
            await self.request("PATCH", path, wanted, "application/apply-patch+yaml")

    async def all_of(self, what: str, work: Iterable[Awaitable[object]]) -> float:
        """Do all of it, show how far it is, and return the seconds that it took."""
        start = time.monotonic()
        tasks = [asyncio.ensure_future(each) for each in work]
        left = set(tasks)
        while left:
            done, left = await asyncio.wait(left, timeout=SHOW_S)
            for each in done:
                each.result()
            if left:
                say(f"{what}: {len(tasks) - len(left)} of {len(tasks)}")
        took = time.monotonic() - start
        say(f"{what}: {len(tasks)} in {took:.1f} s")
        return took

    async def text(self, path: str) -> str:
        """Return what a path of the API server answers, as that of a pod's proxy."""
        answer = await self._call("GET", path)
        data: bytes = await answer.response.read()
        if answer.status >= 400:
            raise ApiError(answer.status, "", data[:300].decode("utf-8", "replace"))
        return data.decode()

    async def request(
        self, method: str, path: str, body: Json | None = None, content: str = "application/json"
    ) -> Json:
        """Send a request and return the JSON of its answer. Raises ApiError."""
        query = [("fieldManager", "scale"), ("force", "true")] if "apply" in content else []
        answer = await self._call(method, path, body, content, query)
        data = await answer.response.read()
        if answer.status >= 400:
            raise ApiError(answer.status, "", data[:300].decode("utf-8", "replace"))
        found: Json = json.loads(data)
        return found

    async def events(self, type: ResourceType, labels: str) -> AsyncIterator[tuple[str, Json]]:
        """Yield the events of a type in all cluster namespaces, those that exist first."""
        query = [("watch", "1"), ("timeoutSeconds", "7200")]
        if labels:
            query.append(("labelSelector", labels))
        answer = await self._call("GET", type.path(), query=query, timeout=7_300)
        while answer.status == TOO_EARLY:
            await asyncio.sleep(PAUSE_S)
            answer = await self._call("GET", type.path(), query=query, timeout=7_300)
        if answer.status >= 400:
            raise ApiError(answer.status, "", (await answer.response.text())[:300])
        rest = b""
        async for data in answer.response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                found = json.loads(line)
                yield found["type"], found["object"]

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content: str = "application/json",
        query: Iterable[tuple[str, str]] = (),
        timeout: float = 60,
    ) -> Any:
        call = await self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "*/*", "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self._client.call_api(*call, _request_timeout=timeout)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """Connect to the cluster of KUBECONFIG."""
    async with api_client(await load_configuration(connections=AT_ONCE + 16)) as client:
        yield Cluster(client)


async def until(
    attempt: Callable[[], Awaitable[T]], wanted: Callable[[T], object], limit_s: float, what: str
) -> T:
    """Return what an attempt gave as soon as that is wanted; a refused one is repeated."""
    end, shown = time.monotonic() + limit_s, time.monotonic() + SHOW_S
    while True:
        found: T | ApiError
        try:
            found = await attempt()
        except ApiError as error:
            found = error
        else:
            if wanted(found):
                return found
        now = time.monotonic()
        if now > end:
            raise TimeoutError(f"{what}: not within {limit_s:g} s: {str(found)[:500]}")
        if now > shown:
            say(f"waiting for {what}: {str(found)[:120]}")
            shown = now + SHOW_S
        await asyncio.sleep(PAUSE_S)


async def remove_namespaces(cluster: Cluster, names: Iterable[str]) -> None:
    """Delete cluster namespaces with all that is in them, and wait until they are gone."""
    wanted = set(names)

    async def remove(name: str) -> None:
        try:
            await cluster.request("DELETE", CLUSTER_NAMESPACES.path(None, name))
        except ApiError as error:
            if error.status != 404:
                raise

    await cluster.all_of("deletion of cluster namespaces", map(remove, sorted(wanted)))

    async def left() -> set[str]:
        return {
            each["metadata"]["name"] async for each in cluster.api.list(CLUSTER_NAMESPACES)
        } & wanted

    await until(left, lambda found: not found, 1_800, "the end of cluster namespaces")


__all__ = ["ApiError", "Cluster", "NotFound", "cluster", "remove_namespaces", "say", "until"]
