"""A broker that answers whatever it likes takes neither the memory nor the time of the operator.

The image of a broker is the operator's, but who may change pods of a cluster namespace may answer
in its place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from postbus.client.control import RequestRefused
from postbus_operator.bus import session as sessions
from postbus_operator.bus.broker_health import readiness_trouble
from postbus_operator.bus.control_client import MAX_ANSWER, Access, BusControl
from postbus_operator.bus.session import BusSession, Periods
from postbus_operator.outcome import BackendUnavailable
from tests.operator.live_bus import leads, wait_until

Answer = Callable[[web.Request], Any]
ENTITY = {
    "kind": "queue",
    "change": "put",
    "managedBy": "",
    "appliedHash": "x",
    "reason": None,
    "restorableUntil": None,
}


def change(number: int) -> dict[str, Any]:
    return ENTITY | {"version": number, "entityId": number, "name": f"queue-{number}"}


class Hostile:
    """A server; `asked` counts its requests by path."""

    def __init__(self, changes: Answer, counts: Answer) -> None:
        self.asked: dict[str, int] = {}
        self._answers = {"/v1/changes": changes, "/v1/runtime": counts}
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] = self.asked.get(request.path, 0) + 1
        if request.path in ("/v1/namespace", "/readyz"):
            raise web.HTTPTemporaryRedirect(f"{self.url}/elsewhere")
        if request.path in self._answers:
            return web.json_response(self._answers[request.path](request))
        return web.json_response({"version": 1})


@asynccontextmanager
async def hostile_bus(changes: Answer, counts: Answer = lambda _: {}) -> AsyncIterator[Hostile]:
    made = Hostile(changes, counts)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


class Listing(BusControl):
    """A client whose status needs no whole answer."""

    async def status(self) -> Any:
        await self.ask("GET", "/v1/status")
        return type("Status", (), {"version": 1})()


def control_of(bus: Hostile) -> BusControl:
    async def read_access() -> Access:
        return Access(bus.url, "token")

    return Listing(read_access, 1, leads)


@asynccontextmanager
async def session_of(bus: Hostile, pause_s: float = 600) -> AsyncIterator[BusSession]:
    periods = Periods(wait_s=50, counts_s=600, outage_s=0, pause_s=pause_s)
    session = BusSession(control_of(bus), lambda _: None, periods=periods)
    task = asyncio.create_task(session.run())
    try:
        yield session
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def endless(request: web.Request) -> Any:
    """Return a page of new entities, again and again."""
    since = int(request.query["since"])
    items = [change(number) for number in range(since + 1, since + 1_001)]
    return {"version": since + 1_000, "items": items}


async def test_an_endless_list_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CHANGES", 5_000)
    async with hostile_bus(endless) as bus, session_of(bus) as session:
        await wait_until(session.is_tried.is_set)
        assert not session.is_listed
        assert "more entities than" in (session.trouble or "")
        assert bus.asked["/v1/changes"] == 6


async def test_endless_texts_are_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CHARS", 1_000_000)

    def long(request: web.Request) -> Any:
        number = int(request.query["since"]) + 1
        return {"version": number, "items": [change(number) | {"name": f"{number}" * 100_000}]}

    async with hostile_bus(long) as bus, session_of(bus) as session:
        await wait_until(session.is_tried.is_set)
        assert "more entities than" in (session.trouble or "")


async def test_an_endless_feed_begins_a_new_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the list the bus reports new entities for ever: what was taken has a bound, too."""
    monkeypatch.setattr(sessions, "MAX_CHANGES", 5_000)
    monkeypatch.setattr(sessions, "FEED_PAUSE_S", 0)

    def after_a_list(request: web.Request) -> Any:
        is_list = request.query["wait"] == "0"
        return {"version": 0, "items": []} if is_list else endless(request)

    async with hostile_bus(after_a_list) as bus, session_of(bus) as session:
        await wait_until(lambda: session.trouble is not None and session.is_listed)
        assert "more entities than" in (session.trouble or "")
        assert len(session.view.paths()) <= 5_000
        assert bus.asked["/v1/changes"] == 1 + 6


async def test_a_bus_that_does_not_wait_is_not_asked_at_once_again() -> None:
    """A long poll without news lasts: after one that ends early there is a pause and a new list."""
    clock = asyncio.get_running_loop().time
    async with (
        hostile_bus(lambda _: {"version": 0, "items": []}) as bus,
        session_of(bus, pause_s=0.2) as session,
    ):
        begun = clock()
        await wait_until(lambda: session.list_count >= 4)
        assert clock() - begun > 3 * 0.1


async def test_versions_without_entities_are_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed does not report rules, and its version grows with them."""
    monkeypatch.setattr(sessions, "FEED_PAUSE_S", 0)

    def rules_change(request: web.Request) -> Any:
        is_list = request.query["wait"] == "0"
        return {"version": int(request.query["since"]) + (not is_list), "items": []}

    async with hostile_bus(rules_change) as bus, session_of(bus) as session:
        await wait_until(lambda: session.view.version >= 5)
        assert (session.trouble, session.list_count) == (None, 1)


async def test_endless_counts_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_CHANGES", 5_000)
    counts = {"items": [], "cursor": "1", "isEnd": False, "startsOver": False}
    async with (
        hostile_bus(lambda _: {"version": 0, "items": []}, lambda _: counts) as bus,
        session_of(bus) as session,
    ):
        async with asyncio.timeout(10):
            await session._read_counts()
        assert bus.asked["/v1/runtime"] <= 10


async def test_a_long_answer_is_an_outage() -> None:
    async with hostile_bus(lambda _: {"junk": "x" * MAX_ANSWER}) as bus:
        control = control_of(bus)
        with pytest.raises(BackendUnavailable, match="too long"):
            await control.changes(0, 0)
        await control.close()


async def test_an_answer_that_leads_elsewhere_is_not_followed() -> None:
    """Who may answer for a broker must not reach with the operator's network what he cannot."""
    async with hostile_bus(lambda _: {}) as bus:
        control = control_of(bus)
        with pytest.raises(BackendUnavailable, match="not that of a control API"):
            await control.ask("PUT", "/v1/namespace", {"tags": {}})
        await control.close()
        await readiness_trouble(f"{bus.url}/readyz")
        assert "/elsewhere" not in bus.asked


@pytest.mark.parametrize("answer", [{"version": "x", "items": []}, {"version": 1}, [], "text"])
async def test_an_answer_of_another_version_is_an_outage(answer: Any) -> None:
    async with hostile_bus(lambda _: answer) as bus:
        control = control_of(bus)
        with pytest.raises(BackendUnavailable, match="of one version"):
            await control.changes(0, 0)
        await control.close()


async def test_a_long_refusal_is_cut() -> None:
    def refuse(_: web.Request) -> Any:
        raise web.HTTPConflict(text=json.dumps({"detail": "x" * 1_000_000}))

    async with hostile_bus(refuse) as bus:
        control = control_of(bus)
        with pytest.raises(RequestRefused) as caught:
            await control.changes(0, 0)
        assert len(str(caught.value)) < 5_000
        await control.close()
