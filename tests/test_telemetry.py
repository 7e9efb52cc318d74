from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import aiohttp
import pytest

from postbus.telemetry import (
    MAX_QUEUE_LABELS,
    BusSample,
    MetricsServer,
    PartitionSample,
    QueueSample,
    bounded,
    configure_logging,
    make_registry,
)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield root
    root.handlers = handlers
    root.setLevel(level)


def test_json_lines_carry_ids_as_fields(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    logging.getLogger("postbus.test").info("link attached", extra={"link": "a/b", "conn": 7})
    logging.getLogger("postbus.test").debug("not written")
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "link attached"
    assert (entry["link"], entry["conn"], entry["level"]) == ("a/b", 7, "info")
    assert entry["time"].endswith("+00:00")


def test_json_lines_hold_an_exception_on_one_line(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("json", "info", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("postbus.test").exception("host failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["error"]


def test_human_lines_show_fields_after_the_message(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logging("human", "warning", stream)
    logging.getLogger("postbus.test").warning("commit failed", extra={"partition": 3})
    assert stream.getvalue().rstrip().endswith("warning commit failed partition=3")


def test_queues_beyond_the_bound_are_summed() -> None:
    queues = [QueueSample(f"q{n:05}", 1, 2, 3, 4) for n in range(MAX_QUEUE_LABELS + 2)]
    kept = bounded(queues)
    assert len(kept) == MAX_QUEUE_LABELS + 1
    assert kept[-1] == QueueSample("other", 2, 4, 6, 8)


async def test_metrics_and_health_are_served() -> None:
    sample = BusSample("1.2.3", 5, 1_000)
    sample.partitions.append(PartitionSample(0, "active", 2, 77, is_full=True))
    sample.queues.append(QueueSample("orders", 10, 1, 0, 4_096))
    is_ready = False
    troubles = ["partition 0: cannot be loaded"]
    server = MetricsServer(make_registry(lambda: sample), lambda: is_ready, lambda: troubles)
    await server.start("127.0.0.1", 0)
    try:
        base = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/metrics") as answer:
                text = await answer.text()
            async with session.get(f"{base}/healthz") as answer:
                assert answer.status == 200
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 503
            is_ready = True
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 200
                assert await answer.text() == "ready\npartition 0: cannot be loaded\n"
    finally:
        await server.stop()
    assert 'postbus_build_info{version="1.2.3"} 1.0' in text
    assert "postbus_connections_count 5.0" in text
    assert 'postbus_partition_full_info{partition="0"} 1.0' in text
    assert 'postbus_partition_reloads_total{partition="0"} 2.0' in text
    assert 'postbus_messages_count{queue="orders",state="active"} 10.0' in text
    assert 'postbus_queue_size_bytes{queue="orders"} 4096.0' in text


async def test_taken_port_is_an_os_error() -> None:
    first = MetricsServer(make_registry(lambda: BusSample("1")), lambda: True, list)
    await first.start("127.0.0.1", 0)
    second = MetricsServer(make_registry(lambda: BusSample("1")), lambda: True, list)
    try:
        with pytest.raises(OSError, match="address already in use"):
            await second.start("127.0.0.1", first.port)
    finally:
        await first.stop()
        await second.stop()
