"""Metrics: values of a sample; guide and alerts name existing ones."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest

from postbus.broker.access.own_names import OwnNames
from postbus.edge.web import http_listener
from postbus.fast import BUILD
from postbus.process.group_metrics import MAX_GROUP_LABELS, GroupSample, bounded_groups
from postbus.process.metrics import (
    FLOWS,
    MAX_ENTITY_LABELS,
    BusSample,
    CommitSample,
    EntitySample,
    ListenerSample,
    MetricsServer,
    PartitionSample,
    StoreSample,
    bounded,
    make_registry,
    summed,
)

ROOT = Path(__file__).resolve().parents[2]
NOW_MS = 1_700_000_000_000
STATES = (
    "active", "locked", "scheduled", "dead_letter", "transfer", "transfer_dead_letter",
    "receivable",
)  # fmt: skip


def full_sample() -> BusSample:
    """Return a sample with something of everything."""
    commits = CommitSample([(0.005, 3), (float("inf"), 4)], 0.7, 40, 5, 6)
    return BusSample(
        "1.2.3",
        NOW_MS,
        1_000,
        2_000,
        7,
        8,
        3,
        4,
        9,
        {"reading": 6},
        1_000_000,
        250_000,
        {"messages": 1_900_000_000.0},
        {("runtime", 201): 11},
        [ListenerSample("amqp", 5, 9)],
        [PartitionSample(0, "active", 2, 1, 77, is_full=True, commits=commits, round_trip_s=0.25)],
        [
            EntitySample(
                "queue",
                "orders",
                {state: number for number, state in enumerate(STATES, 1)},
                4_096,
                {flow: number for number, flow in enumerate(FLOWS, 10)},
                NOW_MS - 90_000,
                {"bad": 3, "none": 1},
            )
        ],
        [
            GroupSample(
                "queue", "orders", "main", "lake", 5, NOW_MS - 90_000, 4_096, 12, 3, is_over=True
            )
        ],
        [StoreSample(1, "db1:5432", is_up=True), StoreSample(2, "db2:5432", is_up=False)],
    )


def exported(sample: BusSample) -> str:
    return generate_latest(make_registry(lambda: sample)).decode()


def names_exported() -> set[str]:
    """Return the names of all series but those of the process."""
    lines = exported(full_sample()).splitlines()
    return {re.split(r"[ {]", line)[0] for line in lines if line.startswith("postbus_")}


def test_every_number_of_a_sample_is_exported() -> None:
    lines = set(exported(full_sample()).splitlines())
    entity = 'entity="orders",kind="queue"'
    group = 'entity="orders",group="lake",kind="queue",sub_queue="main"'
    for line in (
        f'postbus_build_info{{build="{BUILD}",version="1.2.3"}} 1.0',
        "postbus_window_bytes 1000.0",
        "postbus_window_limit_bytes 2000.0",
        "postbus_authentication_failures_total 7.0",
        "postbus_connections_refused_total 8.0",
        "postbus_connections_without_key 3.0",
        "postbus_connections_cut_total 4.0",
        "postbus_connections_failed_total 9.0",
        'postbus_share_refusals_total{of="reading"} 6.0',
        "postbus_data_volume_bytes 1e+06",
        "postbus_data_volume_free_bytes 250000.0",
        'postbus_certificate_expiry_timestamp_seconds{api="messages"} 1.9e+09',
        'postbus_connections{protocol="amqp"} 5.0',
        'postbus_http_requests_total{api="runtime",status="201"} 11.0',
        'postbus_connections_accepted_total{protocol="amqp"} 9.0',
        'postbus_store_up{address="db1:5432",store="1"} 1.0',
        'postbus_store_up{address="db2:5432",store="2"} 0.0',
        'postbus_partition_status_info{partition="0",status="active"} 1.0',
        'postbus_partition_reloads_total{partition="0"} 2.0',
        'postbus_partition_fences_total{partition="0"} 1.0',
        'postbus_journal_queued_bytes{partition="0"} 77.0',
        'postbus_partition_full_info{partition="0"} 1.0',
        'postbus_store_round_trip_seconds{partition="0"} 0.25',
        'postbus_commit_seconds_bucket{le="0.005",partition="0"} 3.0',
        'postbus_commit_seconds_bucket{le="+Inf",partition="0"} 4.0',
        'postbus_commit_seconds_count{partition="0"} 4.0',
        'postbus_commit_seconds_sum{partition="0"} 0.7',
        'postbus_store_written_rows_total{partition="0"} 40.0',
        'postbus_store_reads_total{partition="0"} 5.0',
        'postbus_store_read_rows_total{partition="0"} 6.0',
        f'postbus_messages{{{entity},state="active"}} 1.0',
        f'postbus_messages{{{entity},state="transfer_dead_letter"}} 6.0',
        f"postbus_entity_size_bytes{{{entity}}} 4096.0",
        f"postbus_oldest_message_age_seconds{{{entity}}} 90.0",
        f"postbus_messages_accepted_total{{{entity}}} 10.0",
        f"postbus_messages_expired_total{{{entity}}} 13.0",
        f'postbus_messages_dead_lettered_total{{{entity},reason="bad"}} 3.0',
        f'postbus_messages_dead_lettered_total{{{entity},reason="none"}} 1.0',
        f"postbus_reader_group_lag_messages{{{group}}} 5.0",
        f"postbus_reader_group_lag_seconds{{{group}}} 90.0",
        f"postbus_reader_group_kept_bytes{{{group}}} 4096.0",
        f"postbus_reader_group_epoch{{{group}}} 12.0",
        f"postbus_reader_group_attempts{{{group}}} 3.0",
        f"postbus_reader_group_over_limit_info{{{group}}} 1.0",
    ):
        assert line in lines


def test_no_age_is_exported_for_an_empty_entity() -> None:
    sample = BusSample("1", entities=[EntitySample("queue", "orders", {"active": 0})])
    assert "age_seconds{" not in exported(sample)


def test_entities_beyond_the_bound_are_summed_by_kind() -> None:
    entities = [
        EntitySample(kind, f"e{number:05}", {"active": number}, 4, {"accepted": 2}, 100 + number)
        for kind in ("queue", "topic")
        for number in range(MAX_ENTITY_LABELS + 2)
    ]
    kept = bounded(reversed(entities))
    assert len(kept) == 2 * (MAX_ENTITY_LABELS + 1)
    others = sorted((each for each in kept if each.name == "other"), key=lambda each: each.kind)
    rest = {"active": 2 * MAX_ENTITY_LABELS + 1}
    assert others == [
        EntitySample(kind, "other", rest, 8, {"accepted": 4}, 100 + MAX_ENTITY_LABELS)
        for kind in ("queue", "topic")
    ]


def test_reader_groups_beyond_the_bound_are_one() -> None:
    groups = [
        GroupSample("queue", f"e{n:05}", "main", "lake", n, 100 + n, 4, n, 1, is_over=n == 501)
        for n in range(MAX_GROUP_LABELS + 2)
    ]
    kept = bounded_groups(reversed(groups))
    assert kept[:-1] == groups[:MAX_GROUP_LABELS]
    assert kept[-1] == GroupSample(
        "other", "other", "other", "other", 1_001, 600, 8, 501, 1, is_over=True
    )
    idle = GroupSample("queue", "orders", "main", "lake", 0, None, 0, 1, 0)
    text = exported(BusSample("1", NOW_MS, groups=[idle]))
    assert "lag_seconds{" in text
    assert [line[-4:] for line in text.splitlines() if "lag_seconds{" in line] == [" 0.0"]


def test_reasons_of_the_parts_of_an_entity_are_bounded_together() -> None:
    parts = [
        EntitySample("queue", "q", {}, deaths={f"{part}-{n}": 1 for n in range(20)})
        for part in range(3)
    ]
    deaths = summed("queue", "q", parts).deaths
    assert len(deaths) == 21
    assert (deaths["0-0"], deaths["other"]) == (1, 40)


async def test_metrics_and_health_are_served() -> None:
    is_ready = False
    prepared: list[None] = []

    async def prepare() -> None:
        prepared.append(None)

    async def ready() -> bool:
        return is_ready

    server = MetricsServer(
        make_registry(full_sample),
        ready,
        lambda: ["partition 0: cannot be loaded"],
        prepare,
    )
    await server.start("127.0.0.1", 0)
    try:
        base = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/metrics") as answer:
                assert "postbus_build_info" in await answer.text()
            async with session.get(f"{base}/healthz") as answer:
                assert answer.status == 200
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 503
                assert await answer.text() == "not ready\npartition 0: cannot be loaded\n"
            is_ready = True
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 200
                assert await answer.text() == "ready\npartition 0: cannot be loaded\n"
    finally:
        await server.stop()
    assert len(prepared) == 1


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9464", 200), ("127.0.0.1", 200), ("BUS", 200), ("evil.example", 403)],
)
async def test_rebound_host_name_is_refused(host: str, status: int) -> None:
    async def ready() -> bool:
        return True

    server = MetricsServer(make_registry(full_sample), ready, list, names=OwnNames("bus"))
    await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(headers={"Host": host}) as session:
            for path in ("metrics", "healthz", "readyz"):
                async with session.get(f"http://127.0.0.1:{server.port}/{path}") as answer:
                    assert answer.status == status
    finally:
        await server.stop()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: h"])
async def test_silent_clients_are_disconnected(
    monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(http_listener, "QUIET_S", 0.1)
    server = MetricsServer(make_registry(full_sample), lambda: True, list)
    await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(first)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await server.stop()


async def test_more_connections_than_the_most_cut_off_the_idle_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_listener, "MAX_CONNECTIONS", 5)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def prepare() -> None:
        has_begun.set()
        await may_end.wait()

    server = MetricsServer(make_registry(full_sample), lambda: True, list, prepare)
    await server.start("127.0.0.1", 0)
    asking, scraper = await asyncio.open_connection("127.0.0.1", server.port)
    scraper.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
    await has_begun.wait()
    kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(7)]
    async with asyncio.timeout(10):
        for reader, _ in kept[:3]:
            assert await reader.read() == b""
        may_end.set()
        head = await asking.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"Server: Postbus\r\n" in head
        for reader, writer in kept[3:]:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    for _, writer in [*kept, (asking, scraper)]:
        writer.close()
    await server.stop()


async def test_taken_port_is_an_os_error() -> None:
    first = MetricsServer(make_registry(full_sample), lambda: True, list)
    await first.start("127.0.0.1", 0)
    second = MetricsServer(make_registry(full_sample), lambda: True, list)
    try:
        with pytest.raises(OSError, match="address already in use"):
            await second.start("127.0.0.1", first.port)
    finally:
        await first.stop()
        await second.stop()


# --- the guide and the alerts -------------------------------------------------------------------


def test_guide_names_every_metric() -> None:
    guide = (ROOT / "docs/guides/metrics.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(postbus_\w+)`", guide, re.MULTILINE))
    parts = re.compile(r"(postbus_commit_seconds)_(bucket|sum|count)")
    assert listed == {parts.sub(r"\1", name) for name in names_exported()}


def rules() -> list[dict[str, object]]:
    content = yaml.safe_load((ROOT / "docs/alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_alerts_use_metrics_that_exist() -> None:
    known = names_exported() | {"up"}
    for rule in rules():
        expression = str(rule["expr"])
        promql_parser.parse(expression)
        used = set(re.findall(r"\b(?:postbus_\w+|up)\b(?=[{\[ ])", expression))
        assert used, expression
        assert used <= known, expression


def test_guide_and_unit_tests_cover_every_alert() -> None:
    names = [str(rule["alert"]) for rule in rules()]
    guide = (ROOT / "docs/guides/metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Postbus\w+)`", guide, re.MULTILINE) == names
    tests = yaml.safe_load((ROOT / "tests/alerts_test.yaml").read_text(encoding="utf-8"))
    fired = {
        case["alertname"]
        for test in tests["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert fired == set(names)
