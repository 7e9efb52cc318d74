"""Logging, metrics and health of one process.

The assembly sets it up; rooms only use `logging.getLogger(__name__)` with ids as `extra` fields.
Metrics are read from the bus when they are scraped, so that the message path never counts for
them. Must never write payloads, tokens or connection strings.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from postbus.contract import is_subscription_path, topic_of
from postbus.http_listener import HttpListener

MAX_QUEUE_LABELS: Final = 500
"""Queues, and as many topics and subscriptions, with a label of their own; the rest of each kind is
summed as `other`. Our choice: a hundredth of what
one Prometheus target is usually allowed."""

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# --- logging ------------------------------------------------------------------------------------


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return what a log call gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end."""
        instant = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "time": instant.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(entry, default=str, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """Time of day, level, message, then `name=value` pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without its end; an exception follows on lines of its own."""
        instant = datetime.fromtimestamp(record.created).astimezone()
        pairs = "".join(f" {name}={value}" for name, value in fields_of(record).items())
        line = f"{instant:%H:%M:%S} {record.levelname.lower():<7} {record.getMessage()}{pairs}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def configure_logging(
    form: Literal["human", "json"], level: str, stream: TextIO | None = None
) -> None:
    """Send the log of the whole process to one stream, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for chatty in ("aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(root.level, logging.WARNING))


# --- metrics ------------------------------------------------------------------------------------


@dataclass(slots=True)
class QueueSample:
    """Counts of one queue, subscription or topic at this moment.

    The name of a subscription is its path; a topic has scheduled messages only.
    """

    name: str
    active: int
    dead_letter: int
    scheduled: int
    size_bytes: int


@dataclass(slots=True)
class PartitionSample:
    """State of one partition's host at this moment."""

    partition_id: int
    status: str
    reload_count: int
    queued_bytes: int
    is_full: bool = False


@dataclass(slots=True)
class BusSample:
    """What the metrics tell; made anew for each scrape."""

    version: str
    connections: int = 0
    window_bytes: int = 0
    partitions: list[PartitionSample] = field(default_factory=list)
    queues: list[QueueSample] = field(default_factory=list)
    topics: list[QueueSample] = field(default_factory=list)
    subscriptions: list[QueueSample] = field(default_factory=list)


class BusCollector(Collector):
    """Turns a sample of the bus into metric families."""

    def __init__(self, sample: Callable[[], BusSample]) -> None:
        self._sample = sample

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are checked when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        sample = self._sample()
        build = GaugeMetricFamily("postbus_build_info", "Version.", labels=["version"])
        build.add_metric([sample.version], 1)
        yield build
        yield GaugeMetricFamily(
            "postbus_connections_count", "Open AMQP connections.", sample.connections
        )
        yield GaugeMetricFamily(
            "postbus_window_bytes", "Memory held by messages ready to go.", sample.window_bytes
        )
        yield from _partition_families(sample.partitions)
        yield from _queue_families(bounded(sample.queues))
        yield from _topic_families(bounded(sample.topics))
        yield _subscription_family(bounded(sample.subscriptions))


def _partition_families(partitions: list[PartitionSample]) -> Iterator[Metric]:
    loaded = GaugeMetricFamily(
        "postbus_partition_status_info", "Life cycle.", labels=["partition", "status"]
    )
    reloads = CounterMetricFamily(
        "postbus_partition_reloads", "Reloads after a failed commit.", labels=["partition"]
    )
    queued = GaugeMetricFamily(
        "postbus_journal_queued_bytes", "Waiting for a commit.", labels=["partition"]
    )
    full = GaugeMetricFamily(
        "postbus_partition_full_info",
        "Whether sends are refused because the store has no room.",
        labels=["partition"],
    )
    for partition in partitions:
        name = str(partition.partition_id)
        full.add_metric([name], partition.is_full)
        loaded.add_metric([name, partition.status], 1)
        reloads.add_metric([name], partition.reload_count)
        queued.add_metric([name], partition.queued_bytes)
    yield from (loaded, reloads, queued, full)


def _queue_families(queues: list[QueueSample]) -> Iterator[Metric]:
    messages = GaugeMetricFamily(
        "postbus_messages_count", "Messages in a queue.", labels=["queue", "state"]
    )
    sizes = GaugeMetricFamily(
        "postbus_queue_size_bytes", "Bytes that count against the quota.", labels=["queue"]
    )
    for queue in queues:
        messages.add_metric([queue.name, "active"], queue.active)
        messages.add_metric([queue.name, "dead_letter"], queue.dead_letter)
        messages.add_metric([queue.name, "scheduled"], queue.scheduled)
        sizes.add_metric([queue.name], queue.size_bytes)
    yield from (messages, sizes)


def _topic_families(topics: list[QueueSample]) -> Iterator[Metric]:
    scheduled = GaugeMetricFamily(
        "postbus_topic_scheduled_count", "Scheduled messages of a topic.", labels=["topic"]
    )
    sizes = GaugeMetricFamily(
        "postbus_topic_size_bytes", "Bytes that count against the quota.", labels=["topic"]
    )
    for topic in topics:
        scheduled.add_metric([topic.name], topic.scheduled)
        sizes.add_metric([topic.name], topic.size_bytes)
    yield from (scheduled, sizes)


def _subscription_family(subscriptions: list[QueueSample]) -> Metric:
    messages = GaugeMetricFamily(
        "postbus_subscription_messages_count",
        "Messages in a subscription.",
        labels=["topic", "subscription", "state"],
    )
    for each in subscriptions:
        is_path = is_subscription_path(each.name)  # `other` is none
        labels = [topic_of(each.name) if is_path else each.name, each.name.rpartition("/")[2]]
        messages.add_metric([*labels, "active"], each.active)
        messages.add_metric([*labels, "dead_letter"], each.dead_letter)
    return messages


def bounded(queues: list[QueueSample]) -> list[QueueSample]:
    """Return at most `MAX_QUEUE_LABELS` queues, the first by name; the others as one sum."""
    ordered = sorted(queues, key=lambda queue: queue.name)
    kept, rest = ordered[:MAX_QUEUE_LABELS], ordered[MAX_QUEUE_LABELS:]
    if rest:
        other = QueueSample(
            "other",
            sum(queue.active for queue in rest),
            sum(queue.dead_letter for queue in rest),
            sum(queue.scheduled for queue in rest),
            sum(queue.size_bytes for queue in rest),
        )
        kept.append(other)
    return kept


def make_registry(sample: Callable[[], BusSample]) -> CollectorRegistry:
    """Return a registry with the bus and the process in it."""
    registry = CollectorRegistry()
    registry.register(BusCollector(sample))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves `/metrics`, `/healthz` (the process answers) and `/readyz` (clients may come)."""

    def __init__(
        self,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        troubles: Callable[[], list[str]],
    ) -> None:
        self._registry = registry
        self._is_ready = is_ready
        self._troubles = troubles
        self._listener = HttpListener()

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, host: str, port: int) -> None:
        """Listen; raises OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        await self._listener.start(app, host, port)

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        await self._listener.stop()

    async def _metrics(self, _request: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        if self._is_ready():  # trouble of one partition must not take the others away
            return web.Response(text="\n".join(["ready", *self._troubles(), ""]))
        return web.Response(status=503, text="not ready\n")
