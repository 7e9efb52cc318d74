"""A bus whose database is not as it needs it: a real broker on a real Postgres."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import asyncpg
import pytest

from postbus.process.embedded import EmbeddedPostgres
from postbus_operator.running.abnormal import abnormal_conditions
from postbus_operator.running.condition_events import PATIENCE, report
from tests.conftest import dsn_of, make_database, run_psql
from tests.kube.api_server import ApiServer
from tests.kube.bus_pod import Pod, broker_pod, show_end
from tests.kube.bus_rig import Rig, rig_on
from tests.store.driving import wait_until
from tests.store.pooler import pooling

pytestmark = pytest.mark.slow

NUMBERS: Final = itertools.count(1)
STORE: Final = {"name": "main", "postgres": {"secretRef": {"name": "db"}}}
EXTERNAL: Final = {"operatorSpec": {"storage": {"stores": [STORE]}}}


@pytest.fixture
async def rig(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with rig_on(server, monkeypatch) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A server that asks the role `guest` for a password."""
    made = EmbeddedPostgres(server_folder / "guarded")
    made.start()
    run_psql(made, "create role guest login password 'right'")
    hba = made.folder / "pg_hba.conf"
    hba.write_text("local all postbus trust\nlocal all all scram-sha-256\n")
    run_psql(made, "select pg_reload_conf()")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def careless(server_folder: Path) -> Iterator[EmbeddedPostgres]:
    """A server that may lose what it has confirmed."""
    made = EmbeddedPostgres(server_folder / "without-fsync", settings={"fsync": "off"})
    made.start()
    yield made
    made.stop()


@pytest.fixture
def dsn(guarded: EmbeddedPostgres) -> str:
    """An empty database."""
    name = f"trouble_{next(NUMBERS)}"
    make_database(guarded, name)
    return dsn_of(guarded, name)


def database_of(dsn: str) -> str:
    return dsn.partition("@/")[2].partition("?")[0]


async def apply(rig: Rig, dsn: str, bus: str = "shop-bus") -> None:
    """Apply a bus on a database, and let the operator make what its broker needs."""
    await rig.put(EXTERNAL, bus)
    await rig.put_secret("db", dsn=dsn.encode())
    await rig.look(bus)


async def is_shown(rig: Rig, pod: Pod, reason: str) -> str:
    """Wait until StorageReady has a reason; return its message. Event and metric have it, too."""
    is_end_shown = False

    async def is_it() -> bool:
        nonlocal is_end_shown
        if pod.has_ended and not is_end_shown:
            await show_end(rig, pod)
            is_end_shown = True
        await rig.look()
        found = rig.condition("StorageReady")
        return found is not None and found[:2] == ("False", reason) and "opening" not in found[2]

    await wait_until(is_it)
    storage, ready = rig.condition("StorageReady"), rig.condition("Ready")
    assert storage is not None
    assert ready is not None
    assert ready[0] == "False"
    assert rig.outcome is not None
    assert rig.outcome.status is not None
    later = rig.now + PATIENCE
    said = rig.outcome.events
    events = (*said, *report(rig.outcome.status.conditions, said, later).events)
    assert (reason, storage[2]) in {(each.reason, each.message) for each in events}
    await rig.see()
    counted = {(each.type, each.reason) for each in abnormal_conditions(rig.cache.all())}
    assert ("StorageReady", reason) in counted
    return storage[2]


async def is_serving(pod: Pod) -> None:
    def is_ready() -> bool:
        assert not pod.has_ended, pod.last_words
        try:
            with urllib.request.urlopen(f"{pod.url}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    async def look() -> bool:
        return await asyncio.to_thread(is_ready)

    await wait_until(look)


ADVICE: Final = "correct its address in Secret db"
Break = Callable[[EmbeddedPostgres, str], str]


def read_only(server: EmbeddedPostgres, dsn: str) -> str:
    setting = "default_transaction_read_only = on"
    run_psql(server, f"alter database {database_of(dsn)} set {setting}")
    return dsn


@pytest.mark.parametrize(
    ("spoil", "reason", "said"),
    [
        (lambda *_: "postgresql://a:hidden@127.0.0.1:9/shop", "Unreachable", "Connection refused"),
        (
            lambda _, dsn: dsn.replace("//postbus@", "//guest:hidden@"),
            "AuthFailed",
            'password authentication failed for user "guest"',
        ),
        (lambda _, dsn: dsn.replace("trouble_", "absent_"), "Unreachable", "does not exist"),
        (read_only, "Unreachable", "read-only"),
    ],
    ids=["unreachable", "password", "no-database", "read-only"],
)
async def test_a_broker_waits_and_the_bus_says_for_what(
    rig: Rig,
    guarded: EmbeddedPostgres,
    dsn: str,
    tmp_path: Path,
    spoil: Break,
    reason: str,
    said: str,
) -> None:
    await apply(rig, spoil(guarded, dsn))
    async with broker_pod(rig, tmp_path / "pod") as pod:
        text = await is_shown(rig, pod, reason)
        assert said in text
        assert ADVICE in text
        assert "hidden" not in text
        assert not pod.has_ended


async def test_a_database_without_fsync_is_not_used(
    rig: Rig, careless: EmbeddedPostgres, dsn: str, tmp_path: Path
) -> None:
    await apply(rig, careless.dsn)
    async with broker_pod(rig, tmp_path / "pod") as pod:
        text = await is_shown(rig, pod, "Misconfigured")
    assert "fsync=off" in text
    assert "switch it on" in text
    assert ADVICE in text
    await apply(rig, dsn)
    async with broker_pod(rig, tmp_path / "next") as pod:
        await is_serving(pod)


async def test_a_transaction_pooler_is_not_used(rig: Rig, dsn: str, tmp_path: Path) -> None:
    async with pooling(dsn) as through:
        await apply(rig, through)
        async with broker_pod(rig, tmp_path / "pod") as pod:
            text = await is_shown(rig, pod, "Misconfigured")
    assert "use the address of Postgres itself" in text


async def test_tables_of_a_newer_version_are_not_used(rig: Rig, dsn: str, tmp_path: Path) -> None:
    await apply(rig, dsn)
    async with broker_pod(rig, tmp_path / "first") as pod:
        await is_serving(pod)
    connection = await asyncpg.connect(dsn)
    await connection.execute("insert into postbus.migration values (9999, 'later')")
    await connection.close()
    async with broker_pod(rig, tmp_path / "second") as pod:
        text = await is_shown(rig, pod, "SchemaTooNew")
    assert "run the newer version" in text
    assert "set operatorSpec.image to the newer image" in text
    assert rig.condition("Stalled") == ("True", "SchemaTooNew", text)


async def test_the_store_of_another_bus_is_left_to_it(rig: Rig, dsn: str, tmp_path: Path) -> None:
    await apply(rig, dsn, "other-bus")
    async with broker_pod(rig, tmp_path / "other", "other-bus") as other:
        await is_serving(other)
        await apply(rig, dsn)
        async with broker_pod(rig, tmp_path / "pod") as pod:
            text = await is_shown(rig, pod, "Misconfigured")
        assert "belongs to the bus other-bus" in text
        assert "use another database" in text
        await is_serving(other)
