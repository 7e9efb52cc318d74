"""Messages over HTTP, as tests ask for them again and again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from tests.edge.bus_thread import RULES, BusThread, sas_token

BATCH_TYPE = "application/vnd.microsoft.servicebus.json"


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; `broker` is the JSON of BrokerProperties."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def broker(self) -> dict[str, Any]:
        return json.loads(self.headers["BrokerProperties"])  # type: ignore[no-any-return]

    @property
    def detail(self) -> str:
        """The text of an error, with the status as its code."""
        found = re.fullmatch(
            rb"<Error><Code>(\d+)</Code><Detail>(.*)</Detail></Error>", self.body, re.DOTALL
        )
        assert found is not None, self.body
        assert int(found[1]) == self.status
        return found[2].decode()

    @property
    def path(self) -> str:
        """The path at which a locked message is settled."""
        return "/" + self.headers["Location"].split("/", 3)[3]


def url_of(bus: BusThread) -> str:
    return f"http://127.0.0.1:{bus.port}"


def token_of(bus: BusThread, rule: str = RULES[0].name, duration_s: float = 600) -> str:
    key = next(each.keys.primary for each in RULES if each.name == rule)
    return sas_token(f"{url_of(bus)}/", rule, key, int(time.time() + duration_s))


class HttpClient:
    """Kept-alive connections to a bus."""

    def __init__(self, bus: BusThread, session: aiohttp.ClientSession) -> None:
        self.bus = bus
        self.session = session
        self.token = token_of(bus)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Do one request; `path` is encoded already."""
        fields = {"Authorization": self.token, **(headers or {})}
        url = URL(url_of(self.bus) + path, encoded=True)
        async with self.session.request(method, url, data=body, headers=fields) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def send(
        self,
        entity: str,
        body: bytes | str = b"",
        broker: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        fields = dict(headers or {})
        if broker is not None:
            fields["BrokerProperties"] = json.dumps(broker)
        return await self.call("POST", f"/{quote(entity)}/messages?timeout=30", body, fields)

    async def send_batch(self, entity: str, members: object) -> Answer:
        headers = {"Content-Type": BATCH_TYPE}
        return await self.call("POST", f"/{quote(entity)}/messages", json.dumps(members), headers)

    async def lock(self, entity: str, timeout_s: float = 0) -> Answer:
        return await self.call("POST", f"/{quote(entity)}/messages/head?timeout={timeout_s}")

    async def take(self, entity: str, timeout_s: float = 0) -> Answer:
        """Read and delete."""
        return await self.call("DELETE", f"/{quote(entity)}/messages/head?timeout={timeout_s}")

    def waiting_count(self) -> int:
        """Return the number of waiting receives."""
        return sum(self.bus.receives._waiting.values())
