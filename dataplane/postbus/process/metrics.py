"""Metrics and health of one process over HTTP.

Values are read from the bus at each scrape, so that the message path maintains only plain integers.
Names are listed in docs/guides/metrics.md; a test compares both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from postbus.broker.access.own_names import OwnNames
from postbus.edge.web.http_listener import HttpListener
from postbus.entity.traffic import count_death
from postbus.fast import BUILD
from postbus.process.group_metrics import GroupSample, group_families

MAX_ENTITY_LABELS: Final = 500
"""Entities of each kind with labels of their own; the rest of each kind is summed as `other`. Our
choice: with about fifteen series each, the usual limit of one Prometheus target."""

OTHER: Final = "other"

FLOWS: Final = {
    "accepted": "Messages sent to an entity, with scheduled ones and copies for subscriptions.",
    "delivered": "Deliveries of active messages, including redeliveries.",
    "completed": "Active messages completed by receivers.",
    "expired": "Messages dropped because their time to live was over.",
}


@dataclass(slots=True)
class EntitySample:
    """One queue, topic or subscription at this moment; `name` of a subscription is its path.

    `messages` by state, `flows` by their names, `deaths` by reason; `oldest_ms`: enqueued time of
    the oldest active message, None when there is none or it is unknown.
    """

    kind: str
    name: str
    messages: dict[str, int]
    size_bytes: int = 0
    flows: dict[str, int] = field(default_factory=dict)
    oldest_ms: int | None = None
    deaths: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class CommitSample:
    """Commits and reads of one partition since the process started.

    `buckets`: (upper bound in seconds, commits up to it); the last bound is infinite.
    """

    buckets: list[tuple[float, int]]
    seconds: float
    written_rows: int
    reads: int
    read_rows: int


@dataclass(slots=True)
class PartitionSample:
    """One partition's host at this moment."""

    partition_id: int
    status: str
    reload_count: int
    fence_count: int
    queued_bytes: int
    is_full: bool = False
    commits: CommitSample | None = None
    round_trip_s: float | None = None


@dataclass(slots=True)
class ListenerSample:
    """One listener at this moment."""

    name: str
    connections: int
    accepted: int


@dataclass(slots=True)
class StoreSample:
    """One database: its number in the list, its host and port, and its state."""

    number: int
    address: str
    is_up: bool


@dataclass(slots=True)
class BusSample:
    """Values for the metrics; made for each scrape. Times in entity milliseconds."""

    version: str
    now_ms: int = 0
    window_bytes: int = 0
    window_limit_bytes: int = 0
    authentication_failures: int = 0
    refused_connections: int = 0
    admission_control: int = 0
    cut_unauthenticated: int = 0
    failed_connections: int = 0
    share_refusals: dict[str, int] = field(default_factory=dict)
    """Refusals because a key had used up its share: limit -> count."""

    volume_bytes: int = 0
    volume_free_bytes: int = 0
    certificate_expiries: dict[str, float] = field(default_factory=dict)
    """API -> expiry of its certificate, seconds since 1970."""

    http_answers: dict[tuple[str, int], int] = field(default_factory=dict)
    """(API, status) -> number of responses."""

    listeners: list[ListenerSample] = field(default_factory=list)
    partitions: list[PartitionSample] = field(default_factory=list)
    entities: list[EntitySample] = field(default_factory=list)
    groups: list[GroupSample] = field(default_factory=list)
    stores: list[StoreSample] = field(default_factory=list)


class BusCollector(Collector):
    """Turns a sample of the bus into metric families."""

    def __init__(self, sample: Callable[[], BusSample]) -> None:
        self._sample = sample

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are checked at the collection."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        sample = self._sample()
        build = GaugeMetricFamily("postbus_build_info", "Version.", labels=["version", "build"])
        build.add_metric([sample.version, BUILD], 1)
        yield build
        yield GaugeMetricFamily(
            "postbus_window_bytes", "Memory of messages ready for delivery.", sample.window_bytes
        )
        yield GaugeMetricFamily(
            "postbus_window_limit_bytes",
            "Limit of the memory of messages ready for delivery.",
            sample.window_limit_bytes,
        )
        yield CounterMetricFamily(
            "postbus_authentication_failures",
            "Tokens and passwords that were refused.",
            sample.authentication_failures,
        )
        yield CounterMetricFamily(
            "postbus_connections_refused",
            "Connections refused because there were too many.",
            sample.refused_connections,
        )
        yield GaugeMetricFamily(
            "postbus_connections_without_key",
            "Open connections that are not authenticated.",
            sample.admission_control,
        )
        yield CounterMetricFamily(
            "postbus_connections_cut",
            "Unauthenticated connections evicted to admit others.",
            sample.cut_unauthenticated,
        )
        yield CounterMetricFamily(
            "postbus_connections_failed",
            "Connections that failed before their protocol was known.",
            sample.failed_connections,
        )
        shares = CounterMetricFamily(
            "postbus_share_refusals",
            "Refusals because a key had used up its share of a limit.",
            labels=["of"],
        )
        for name, count in sample.share_refusals.items():
            shares.add_metric([name], count)
        yield shares
        yield GaugeMetricFamily(
            "postbus_data_volume_bytes", "Size of the volume with the data.", sample.volume_bytes
        )
        yield GaugeMetricFamily(
            "postbus_data_volume_free_bytes",
            "Free space on the volume with the data.",
            sample.volume_free_bytes,
        )
        yield _expiry_family(sample.certificate_expiries)
        yield from _listener_families(sample.listeners)
        yield _http_family(sample.http_answers)
        yield _store_family(sample.stores)
        yield from _partition_families(sample.partitions)
        yield from _commit_families(sample.partitions)
        yield from _entity_families(bounded(sample.entities), sample.now_ms)
        yield from group_families(sample.groups, sample.now_ms)


def _listener_families(listeners: list[ListenerSample]) -> Iterator[Metric]:
    opened = GaugeMetricFamily("postbus_connections", "Open connections.", labels=["protocol"])
    accepted = CounterMetricFamily(
        "postbus_connections_accepted", "Connections accepted.", labels=["protocol"]
    )
    for listener in listeners:
        opened.add_metric([listener.name], listener.connections)
        accepted.add_metric([listener.name], listener.accepted)
    yield from (opened, accepted)


def _store_family(stores: list[StoreSample]) -> Metric:
    family = GaugeMetricFamily(
        "postbus_store_up",
        "Whether a database works for the bus.",
        labels=["store", "address"],
    )
    for store in stores:
        family.add_metric([str(store.number), store.address], store.is_up)
    return family


def _expiry_family(expiries: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(
        "postbus_certificate_expiry_timestamp_seconds",
        "Expiry of the certificate in use, since 1970.",
        labels=["api"],
    )
    for api, expires_s in expiries.items():
        family.add_metric([api], expires_s)
    return family


def _http_family(answers: dict[tuple[str, int], int]) -> Metric:
    requests = CounterMetricFamily(
        "postbus_http_requests",
        "HTTP requests by status of the response.",
        labels=["api", "status"],
    )
    for (api, status), count in answers.items():
        requests.add_metric([api, str(status)], count)
    return requests


def _partition_families(partitions: list[PartitionSample]) -> Iterator[Metric]:
    labels = ["partition"]
    status = GaugeMetricFamily(
        "postbus_partition_status_info", "Lifecycle status.", labels=["partition", "status"]
    )
    reloads = CounterMetricFamily(
        "postbus_partition_reloads", "Reloads after a failed commit.", labels=labels
    )
    fences = CounterMetricFamily(
        "postbus_partition_fences", "Losses of the partition to another broker.", labels=labels
    )
    queued = GaugeMetricFamily(
        "postbus_journal_queued_bytes", "Bytes waiting for a commit.", labels=labels
    )
    round_trips = GaugeMetricFamily(
        "postbus_store_round_trip_seconds",
        "Duration of the last heartbeat, a commit of one row.",
        labels=labels,
    )
    full = GaugeMetricFamily(
        "postbus_partition_full_info",
        "Whether sends are refused because the store is full.",
        labels=labels,
    )
    for partition in partitions:
        name = str(partition.partition_id)
        status.add_metric([name, partition.status], 1)
        reloads.add_metric([name], partition.reload_count)
        fences.add_metric([name], partition.fence_count)
        queued.add_metric([name], partition.queued_bytes)
        full.add_metric([name], partition.is_full)
        if partition.round_trip_s is not None:
            round_trips.add_metric([name], partition.round_trip_s)
    yield from (status, reloads, fences, queued, full, round_trips)


def _commit_families(partitions: list[PartitionSample]) -> Iterator[Metric]:
    labels = ["partition"]
    seconds = HistogramMetricFamily(
        "postbus_commit_seconds", "Time from the start of a commit to its answer.", labels=labels
    )
    written = CounterMetricFamily("postbus_store_written_rows", "Rows committed.", labels=labels)
    reads = CounterMetricFamily(
        "postbus_store_reads", "Reads of messages that were not in memory.", labels=labels
    )
    rows = CounterMetricFamily(
        "postbus_store_read_rows", "Messages read because they were not in memory.", labels=labels
    )
    for partition in partitions:
        commits = partition.commits
        if commits is None:
            continue
        name = [str(partition.partition_id)]
        buckets = [
            ("+Inf" if bound == float("inf") else str(bound), float(count))
            for bound, count in commits.buckets
        ]
        seconds.add_metric(name, buckets, commits.seconds)
        written.add_metric(name, commits.written_rows)
        reads.add_metric(name, commits.reads)
        rows.add_metric(name, commits.read_rows)
    yield from (seconds, written, reads, rows)


def _entity_families(entities: list[EntitySample], now_ms: int) -> Iterator[Metric]:
    labels = ["kind", "entity"]
    messages = GaugeMetricFamily(
        "postbus_messages", "Messages in an entity.", labels=[*labels, "state"]
    )
    sizes = GaugeMetricFamily(
        "postbus_entity_size_bytes", "Bytes that count against the quota.", labels=labels
    )
    ages = GaugeMetricFamily(
        "postbus_oldest_message_age_seconds", "Age of the oldest active message.", labels=labels
    )
    flows = {
        name: CounterMetricFamily(f"postbus_messages_{name}", text, labels=labels)
        for name, text in FLOWS.items()
    }
    deaths = CounterMetricFamily(
        "postbus_messages_dead_lettered",
        "Messages that were dead-lettered.",
        labels=[*labels, "reason"],
    )
    for entity in entities:
        name = [entity.kind, entity.name]
        for state, count in entity.messages.items():
            messages.add_metric([*name, state], count)
        sizes.add_metric(name, entity.size_bytes)
        if entity.oldest_ms is not None:
            ages.add_metric(name, max(now_ms - entity.oldest_ms, 0) / 1_000)
        for flow, count in entity.flows.items():
            flows[flow].add_metric(name, count)
        for reason, count in entity.deaths.items():
            deaths.add_metric([*name, reason], count)
    yield from (messages, sizes, ages, *flows.values(), deaths)


def bounded(entities: Iterable[EntitySample]) -> list[EntitySample]:
    """Return at most `MAX_ENTITY_LABELS` of each kind, the first by name; the others as one sum."""
    by_kind: dict[str, list[EntitySample]] = {}
    for entity in sorted(entities, key=lambda each: each.name):
        by_kind.setdefault(entity.kind, []).append(entity)
    kept: list[EntitySample] = []
    for kind, found in by_kind.items():
        kept += found[:MAX_ENTITY_LABELS]
        rest = found[MAX_ENTITY_LABELS:]
        if rest:
            kept.append(summed(kind, OTHER, rest))
    return kept


def summed(kind: str, name: str, parts: Iterable[EntitySample]) -> EntitySample:
    """Return the sum of entities, or of the parts of one, with the age of the oldest."""
    total = EntitySample(kind, name, {})
    for part in parts:
        for counts, more in ((total.messages, part.messages), (total.flows, part.flows)):
            for key, count in more.items():
                counts[key] = counts.get(key, 0) + count
        for reason, count in part.deaths.items():
            count_death(total.deaths, reason, count)
        total.size_bytes += part.size_bytes
        ages = [each for each in (total.oldest_ms, part.oldest_ms) if each is not None]
        total.oldest_ms = min(ages, default=None)
    return total


def make_registry(sample: Callable[[], BusSample]) -> CollectorRegistry:
    """Return a registry with the metrics of the bus and of the process."""
    registry = CollectorRegistry()
    registry.register(BusCollector(sample))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class MetricsServer:
    """Serves `/metrics`, `/healthz` (the process answers) and `/readyz` (clients may connect)."""

    def __init__(
        self,
        registry: CollectorRegistry,
        is_ready: Callable[[], Awaitable[bool]],
        troubles: Callable[[], list[str]],
        prepare: Callable[[], Awaitable[None]] | None = None,
        names: OwnNames | None = None,
    ) -> None:
        """`prepare` is awaited before each scrape. `names`: accepted host names of requests."""
        self._registry = registry
        self._is_ready = is_ready
        self._troubles = troubles
        self._prepare = prepare
        self._names = names
        self._listener = HttpListener()

    @property
    def port(self) -> int:
        return self._listener.port

    async def start(self, host: str, port: int) -> None:
        """Listen; raises OSError when the port is taken."""
        app = web.Application(middlewares=[self._check_host])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/readyz", self._ready)
        await self._listener.start(app, host, port)

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        await self._listener.stop()

    @web.middleware
    async def _check_host(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests for other host names: those of pages whose name resolves to loopback."""
        host = request.headers.get("Host")
        if self._names is not None and host is not None and not self._names.include(host):
            return web.Response(status=403, text=f"This bus is not called {host}.\n")
        return await handler(request)

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self._prepare is not None:
            await self._prepare()
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response(text=f"ok\nbuild: {BUILD}\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        is_ready = await self._is_ready()
        first = "ready" if is_ready else "not ready"
        text = "\n".join([first, *self._troubles(), ""])
        return web.Response(status=200 if is_ready else 503, text=text)
