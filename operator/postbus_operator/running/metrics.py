"""Metrics of the operator for Prometheus; docs/guides/kubernetes-operator.md lists them."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import postbus
from postbus_operator.crds import KINDS
from postbus_operator.running.abnormal import SUMMARIES, AbnormalCondition

LOOK_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 5, 20, 60, 120)
REQUEST_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 5, 30)

MAX_SERIES: Final = 500
"""Most series of a metric that has one for each resource, as for the entities of a broker."""

RESULTS: Final = (
    "done", "waiting", "invalid", "unavailable", "refused", "failed", "conflict", "unwritten",
    "gone", "unchanged",
)  # fmt: skip
"""Results of looks; each is there from the start, so that a first one is an increase."""


class Metrics:
    """Counters that the operator feeds, and gauges that are asked for their value."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._looks = Counter(
            "postbus_operator_reconciles",
            "Looks at a resource, by their result",
            ["kind", "result"],
            registry=self._registry,
        )
        for kind in KINDS:
            for result in RESULTS:
                self._looks.labels(kind.name, result)
        self._look_seconds = Histogram(
            "postbus_operator_reconcile_seconds",
            "Duration of a look at a resource",
            ["kind"],
            buckets=LOOK_BUCKETS,
            registry=self._registry,
        )
        self._wait_seconds = Histogram(
            "postbus_operator_queue_wait_seconds",
            "Time that a resource waited for its look after it was due",
            buckets=LOOK_BUCKETS,
            registry=self._registry,
        )
        self._requests = Counter(
            "postbus_operator_api_requests",
            "Requests to the API server, without watches; code 0: no answer",
            ["verb", "code"],
            registry=self._registry,
        )
        self._request_seconds = Histogram(
            "postbus_operator_api_request_seconds",
            "Duration of a request to the API server",
            ["verb"],
            buckets=REQUEST_BUCKETS,
            registry=self._registry,
        )
        self._ages = Gauge(
            "postbus_operator_watch_age_seconds",
            "Time since a watch brought an event, a bookmark or a list, or connected",
            ["resource", "namespace"],
            registry=self._registry,
        )
        self._resources = Gauge(
            "postbus_operator_resources",
            "Resources in the cache",
            ["kind"],
            registry=self._registry,
        )
        info = Gauge(
            "postbus_operator_info", "Version of the operator", ["version"], registry=self._registry
        )
        info.labels(postbus.__version__).set(1)
        self._of_resources = _ResourceGauges(self._registry)

    def looked(self, kind: str, result: str) -> None:
        """Count a look."""
        self._looks.labels(kind, result).inc()

    def timed(self, kind: str, waited_s: float, took_s: float) -> None:
        """Record the times of a look."""
        self._wait_seconds.observe(waited_s)
        self._look_seconds.labels(kind).observe(took_s)

    def answered(self, verb: str, status: int, seconds: float) -> None:
        """Count a request to the API server; status 0: no answer."""
        self._requests.labels(verb, str(status)).inc()
        self._request_seconds.labels(verb).observe(seconds)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is asked for at each scrape."""
        Gauge(f"postbus_operator_{name}", text, registry=self._registry).set_function(value)

    def set_age(self, resource: str, namespace: str, seconds: float) -> None:
        """Set the age of a watch."""
        self._ages.labels(resource, namespace).set(seconds)

    def set_resources(self, kind: str, count: int) -> None:
        """Set the number of resources of a kind."""
        self._resources.labels(kind).set(count)

    def set_conditions(self, found: Sequence[AbnormalCondition]) -> None:
        """Set the conditions out of the ordinary; the oldest are first."""
        self._of_resources.set_conditions(found)

    def set_certificates(self, ends: Mapping[tuple[str, str], float]) -> None:
        """Set the ends of certificates by namespace and Secret."""
        self._of_resources.set_certificates(ends)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)


class _ResourceGauges:
    """Gauges with a series for each resource or Secret, of which there may be too many."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._conditions = Gauge(
            "postbus_operator_conditions",
            "Conditions out of the ordinary: a Ready that is not True, Reconciling, Stalled, "
            "Drifted, DeletionBlocked, and all others that are False or a warning",
            ["kind", "condition", "reason"],
            registry=registry,
        )
        self._condition_starts = Gauge(
            "postbus_operator_condition_timestamp_seconds",
            "Begin of each Ready that is not True, Reconciling, Stalled, Drifted and "
            f"DeletionBlocked, seconds since 1970; the {MAX_SERIES} oldest",
            ["kind", "resource_namespace", "name", "condition", "reason"],
            registry=registry,
        )
        self._certificate_ends = Gauge(
            "postbus_operator_certificate_expiry_timestamp_seconds",
            f"Ends of certificates in Secrets, seconds since 1970; the {MAX_SERIES} next ones",
            ["resource_namespace", "secret"],
            registry=registry,
        )

    def set_conditions(self, found: Sequence[AbnormalCondition]) -> None:
        """Set the conditions out of the ordinary; the oldest are first."""
        self._conditions.clear()
        self._condition_starts.clear()
        counts = Counts((each.resource.kind, each.type, each.reason) for each in found)
        for labels, count in counts.items():
            self._conditions.labels(*labels).set(count)
        named = [each for each in found if each.type in SUMMARIES]
        for each in named[:MAX_SERIES]:
            self._condition_starts.labels(*each.resource, each.type, each.reason).set(each.start)

    def set_certificates(self, ends: Mapping[tuple[str, str], float]) -> None:
        """Set the ends of certificates by namespace and Secret."""
        self._certificate_ends.clear()
        for labels in sorted(ends, key=lambda each: (ends[each], each))[:MAX_SERIES]:
            self._certificate_ends.labels(*labels).set(ends[labels])
