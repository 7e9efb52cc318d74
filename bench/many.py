"""Many queues: messages through a hundred of them at once, and ten thousand that exist.

Only Postbus is measured.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import time
from functools import partial
from urllib.parse import quote_plus

import aiohttp

from measuring import MAIN_QUEUE, Bench, Result, costing
from messaging import alternate, both_ways, cpu_of, rate_of, summary_of
from postbus_server import OWNER, Postbus, document
from rows import Demand, Metric, Row, warm_up
from server import LOOPBACK, BenchError, Server

HUNDRED = tuple(f"many-{number:03}" for number in range(100))
ENTITY_COUNT = 10_000
PAGE = 100
IDLE_S = 20
WINDOW = 1_000
"""Unacknowledged messages of the one queue, with which it is fastest."""
LINK_WINDOW = 100
"""Those of each of the hundred: as of every other row."""
SHARED = ("--shared-connections", 4)
"""Of each direction: eight in all."""


def _hundred_queues(bench: Bench, server: Server) -> Result:
    """Alternate between one queue at its fastest and a hundred."""
    server.start()
    warm_up(bench, server)
    every = ",".join(HUNDRED)
    bench.client.run(server, every, "--mode", "both", "--window", 1, "--count", 10 * len(HUNDRED))
    both = partial(both_ways, bench, server)
    few = WINDOW // len(HUNDRED)
    results = alternate(
        bench,
        {
            "one": (lambda: both(MAIN_QUEUE, "--window", WINDOW), "each_way_rate"),
            "many": (lambda: both(every, "--window", LINK_WINDOW, *SHARED), "each_way_rate"),
            "few": (lambda: both(every, "--window", few, *SHARED), "each_way_rate"),
            "apart": (lambda: both(every, "--window", few), "each_way_rate"),
        },
    )
    return summary_of(results, [("many", "one"), ("few", "one"), ("apart", "one")])


def _ten_thousand(_: Bench, server: Server) -> Result:
    """Start with ten thousand queues, list them, and let them be."""
    assert isinstance(server, Postbus)
    server.start()
    first_mib = server.resident_kib() / 1024
    list_s = asyncio.run(_list_queues(server))
    time.sleep(2)
    with costing(server) as cost:
        time.sleep(IDLE_S)
    idle = 100 * (cost.broker_s + cost.postgres_s) / cost.elapsed_s
    server.stop()
    began = time.monotonic()
    server.start(fresh=False)
    return {
        "start_s": time.monotonic() - began,
        "list_s": list_s,
        "idle_cpu_percent": idle,
        "memory_mib": max(first_mib, server.resident_kib() / 1024),
        "foreign_share": cost.foreign_share,
    }


async def _list_queues(server: Postbus) -> float:
    """Return how long an administration client takes to read all pages."""
    url = f"http://{LOOPBACK}:{server.http_port}"
    headers = {"Authorization": _token(url, str(server.user), str(server.password))}
    found = 0
    async with aiohttp.ClientSession(headers=headers) as session:
        began = time.monotonic()
        while True:
            page = f"{url}/$Resources/queues?$skip={found}&$top={PAGE}&api-version=2021-05"
            async with session.get(page) as answer:
                text = await answer.text()
            entries = text.count("<QueueDescription")
            found += entries
            if entries < PAGE:
                break
        elapsed_s = time.monotonic() - began
    if found < ENTITY_COUNT:
        raise BenchError(f"only {found} queues were listed")
    return elapsed_s


def _token(resource: str, rule: str, key: str) -> str:
    """Return a shared access signature."""
    encoded, expiry = quote_plus(resource), int(time.time()) + 3_600
    digest = hmac.new(key.encode(), f"{encoded}\n{expiry}".encode(), hashlib.sha256).digest()
    signature = quote_plus(base64.b64encode(digest))
    return f"SharedAccessSignature sr={encoded}&sig={signature}&se={expiry}&skn={rule}"


MANY_ROWS: tuple[Row, ...] = (
    Row(
        "many-queues",
        "100 queues over 8 connections, beside one queue",
        _hundred_queues,
        (
            rate_of("one", "one queue"),
            rate_of("many", "100 queues"),
            Metric("many_share", "100 queues, of one", "%"),
            Metric("few_share", "100 queues with the one's window divided, of one", "%"),
            Metric("apart_share", "the same, a connection each, of one", "%"),
            cpu_of("one", "one queue"),
            cpu_of("many", "100 queues"),
            cpu_of("few", "100 queues with the one's window divided"),
            cpu_of("apart", "the same, a connection each"),
        ),
        (Demand("many_share", None, 80, 80),),
        is_interleaved=False,
        only="postbus",
        queues=(MAIN_QUEUE, *HUNDRED),
    ),
    Row(
        "many-entities",
        "10,000 queues",
        _ten_thousand,
        (
            Metric("start_s", "restart", "s", is_better_high=False),
            Metric("list_s", "list all by 100", "s", is_better_high=False),
            Metric("idle_cpu_percent", "idle CPU", "%", is_better_high=False),
            Metric("memory_mib", "memory", "MiB", is_better_high=False),
        ),
        (
            Demand("start_s", None, 10, 10),
            Demand("list_s", None, 2, 2),
            Demand("idle_cpu_percent", None, 2, 2),
            Demand("memory_mib", None, 400, 400),
        ),
        is_interleaved=False,
        only="postbus",
        documents="".join(
            document("Queue", f"entity-{number:05}", OWNER, "maxDeliveryCount: 7")
            for number in range(ENTITY_COUNT - 2)
        ),
    ),
)
