"""The HTTP session that kopf watches with: it shows lists and bookmarks, which kopf keeps.

kopf hands events to handlers, and nothing else. The operator needs three things more:

- When each list is complete: before, nothing may run. kopf's own means, index functions, wake all
  waiting objects for each object of the lists (ADR 40 has measurements).
- What a list lacks: after an interruption kopf lists again, and tells nobody what is gone.
- That a silent watch lives: bookmarks do not reach handlers. Where nothing of a type has happened
  since the API server began it sends none either, and the sign is a new connection: kopf makes one
  when it has heard nothing for 70 s.

So lists are taken here, where their answers are read, and kopf sees them empty; events take kopf's
way. `tests/kube/test_watching.py` shows that an upgrade of kopf or aiohttp keeps this working.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp.client_middlewares import ClientHandlerType
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from postbus_operator.kube.observer import Observer


def watch_session(configuration: Configuration, observer: Observer) -> aiohttp.ClientSession:
    """Return a session with the credentials of a configuration."""
    tls = RESTClientObject(configuration).ssl_context

    async def authorize(
        request: aiohttp.ClientRequest, send: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        # For each request: the token of a pod is replaced each hour.
        token = await configuration.get_api_key_with_prefix("BearerToken")
        if token is not None:
            request.headers["Authorization"] = token
        return await send(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        headers={"User-Agent": "postbus-operator"},
        middlewares=(authorize,),
        response_class=_response_class(observer),
    )


def _response_class(observer: Observer) -> type[aiohttp.ClientResponse]:
    class WatchResponse(aiohttp.ClientResponse):
        """An answer whose lists and streams the observer sees."""

        async def json(self, **options: Any) -> Any:
            answer = await super().json(**options)
            watch = observer.watch_at(self.url.path)
            if watch is not None and self.status == 200 and isinstance(answer.get("items"), list):
                observer.listed(watch, self.url.query, answer)
                answer["items"] = []
            return answer

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            watch = observer.watch_at(self.url.path)
            if watch is not None and self.url.query.get("watch") == "true" and self.status == 200:
                observer.heard(watch)
                content: Any = _Heard(self.content, lambda: observer.heard(watch))
                self.content = content
            return self

    return WatchResponse


class _Heard:
    """A stream that reports each chunk that is read from it."""

    def __init__(self, stream: aiohttp.StreamReader, on_data: Callable[[], None]) -> None:
        self._stream = stream
        self._on_data = on_data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._stream.iter_chunked(size):
            self._on_data()
            yield chunk
