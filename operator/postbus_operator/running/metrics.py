"""Metrics of the operator for Prometheus; docs/guides/kubernetes-operator.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import postbus
from postbus_operator.crds import KINDS

LOOK_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 5, 20, 60, 120)
REQUEST_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 5, 30)

RESULTS: Final = (
    "done", "waiting", "invalid", "unavailable", "refused", "failed", "conflict", "unwritten",
    "gone",
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

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)
