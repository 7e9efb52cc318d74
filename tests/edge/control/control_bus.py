"""A whole bus in a loop and a thread of its own, and a caller of its control API that blocks."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from postbus.assembly.bus import Bus
from postbus.broker.partition.clock import ClockMode
from postbus.contract.entities import NamespaceProperties, QueueProperties, Right
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition, RuleKeys
from postbus.process.data_directory import DataDirectory
from postbus.process.settings import Settings

WAIT_S = 60.0
KEYS = RuleKeys("first-secret-key", "second-secret-key")
DEFINITION = BusDefinition(
    "test-bus",
    NamespaceProperties(),
    (RuleDefinition("root", frozenset(Right), KEYS),),
    (QueueDefinition("declared", QueueProperties(), ()),),
)


class ControlResponse(NamedTuple):
    """An answer; `body` is read as JSON."""

    status: int
    body: Any
    headers: http.client.HTTPMessage

    @property
    def kind(self) -> str:
        return str(self.body["type"]).rpartition(":")[2]


class Caller:
    """Speaks to a control API with a token; every answer must be JSON."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.token = token
        self.texts: list[str] = []

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
    ) -> ControlResponse:
        """Return the answer. `token` empty sends none; `data` is sent instead of JSON."""
        url = urlsplit(self.address)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=WAIT_S)
        token = self.token if token is None else token
        fields = {"Authorization": f"Bearer {token}"} if token else {}
        if body is not None or data is not None:
            fields["Content-Type"] = "application/json"
            data = json.dumps(body).encode() if data is None else data
        try:
            connection.request(method, path, data, {**fields, **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        self.texts.append(f"{response.headers}\n{text}")
        kind = response.headers.get_content_type()
        wanted = "application/json" if response.status < 400 else "application/problem+json"
        assert kind == wanted, (response.status, text)
        answer = json.loads(text)
        if response.status >= 400:
            assert answer["status"] == response.status
            assert answer["detail"]
        return ControlResponse(response.status, answer, response.headers)

    def get(self, path: str, **options: Any) -> ControlResponse:
        return self.call("GET", path, **options)

    def put(self, path: str, body: object, **options: Any) -> ControlResponse:
        return self.call("PUT", path, body, **options)

    def post(self, path: str, body: object = None, **options: Any) -> ControlResponse:
        return self.call("POST", path, body, **options)

    def delete(self, path: str, **options: Any) -> ControlResponse:
        return self.call("DELETE", path, **options)


class ControlledBus(NamedTuple):
    """A running bus; `connection_string` is of the rule that may do everything."""

    bus: Bus
    loop: asyncio.AbstractEventLoop
    caller: Caller
    connection_string: str
    token_file: Path

    def run(self, work: Any) -> Any:
        """Run a coroutine in the bus's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)


@contextmanager
def controlled_bus(
    database: str,
    folder: Path,
    clock: ClockMode | None = ClockMode.MANUAL,
    definition: BusDefinition = DEFINITION,
    **more: object,
) -> Iterator[ControlledBus]:
    """Run a bus on a database until the block ends."""
    ready: Future[tuple[Bus, asyncio.AbstractEventLoop]] = Future()
    stop = threading.Event()

    async def serve() -> None:
        ports = {"port": 0, "tls_port": 0, "http_port": 0, "metrics_port": 0, "control_port": 0}
        settings = Settings.model_validate({**ports, "grace_s": 1.0, "stores": database, **more})
        with DataDirectory(folder) as data:
            bus = Bus(settings, definition, data, is_embedded=False, dev_clock=clock)
            try:
                await bus.start()
                ready.set_result((bus, asyncio.get_running_loop()))
                await asyncio.to_thread(stop.wait)
            finally:
                await bus.stop()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="controlled bus")
    thread.start()
    try:
        bus, loop = ready.result(WAIT_S)
        addresses = dict(bus.summary())
        token_file = Path(addresses["token"])
        token = token_file.read_text(encoding="ascii").split()[0]
        caller = Caller(addresses["control"], token)
        yield ControlledBus(bus, loop, caller, bus.connection_strings()[0][1], token_file)
    finally:
        stop.set()
        thread.join(WAIT_S)


def path_of(*parts: str) -> str:
    """Return a path of the API; every second part is a name."""
    shown = [quote(part, safe="") if at % 2 else part for at, part in enumerate(parts)]
    return "/v1/" + "/".join(shown)
