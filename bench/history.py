"""Start of a broker over millions of settled messages that their queue keeps.

Two servers of the same kind, one with the kept rows and one without, start alternately with the
same number of live messages. The kept rows are copies of a real one, written with SQL. Only Postbus
is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time

from measuring import Bench, Result
from messaging import HISTORY, RETENTION_QUEUE
from postbus_server import OWNER, Postbus, document, fetch_value, run_script
from rows import Demand, Metric, Row, seconds_to_accept
from server import BenchError, Server

KEPT = 10_000_000
LIVE = 20_000
BODY_BYTES = 128
"""Of kept messages: a load reads no row, so that their size counts for the disk alone."""
BLOCK_KEYS = 65_536
LIMIT_S = 1_800

SCHEMAS = "select string_agg(schemaname, ' ') from pg_tables where tablename = 'settled'"
HAS_SETTLED = "select exists (select from {schema}.settled)"
FILL = """
set search_path = {schema};
with sample as (
    select m.*, b.entity_no, b.first_key, b.size, b.first_sequence
    from message m join settled s using (row_key)
    join block b on m.row_key between b.first_key and b.first_key + b.size - 1
    order by m.row_key limit 1
), blocks as (
    insert into block (first_key, size, entity_no, sub_queue, first_sequence)
    select first_key + (n + 1) * {block}, {block}, entity_no, 0, first_sequence + size + n * {block}
    from sample, generate_series(0, {blocks} - 1) as n
), rows as (
    insert into message (row_key, enqueued_ms, envelope, application_properties, body)
    select first_key + {block} + n, enqueued_ms, envelope, application_properties, body
    from sample, generate_series(0::bigint, {blocks}::bigint * {block} - 1) as n
)
insert into settled (row_key, entity_no, how, settled_ms)
select first_key + {block} + n, entity_no, 1, enqueued_ms
from sample, generate_series(0::bigint, {blocks}::bigint * {block} - 1) as n;
vacuum (truncate off, index_cleanup on, parallel 0) message;
vacuum (truncate off, index_cleanup on, parallel 0) settled
"""
"""Blocks as a busy queue has them, after that of the sample: a later life has keys above them."""
UNMARKED = """
select count(*) from {schema}.block b where size = {block} and settled_parts <> 4294967295
"""


def _start_over_kept(bench: Bench, server: Server) -> Result:
    assert isinstance(server, Postbus)
    if server.dsn is not None:
        raise BenchError("this row needs two servers with a Postgres each: leave --dsn out")
    plain = Postbus(
        server.directory.with_name("postbus-without"),
        server.port + 30,
        server.queues,
        dsn=None,
        tier=server.tier,
        documents=server.documents,
    )
    plain.directory.mkdir(parents=True, exist_ok=True)
    try:
        return _alternate(bench, server, plain)
    finally:
        plain.stop()


def _alternate(bench: Bench, server: Postbus, plain: Postbus) -> Result:
    live = bench.count(LIVE)
    for each in (server, plain):
        each.start()
        _settle_some(bench, each)
    schema = _schema_of(server)
    blocks = max(1, round(bench.count(KEPT) / BLOCK_KEYS))
    script = FILL.format(schema=schema, block=BLOCK_KEYS, blocks=blocks)
    began = time.monotonic()
    asyncio.run(run_script(server.reachable_dsn(), script))
    fill_s = time.monotonic() - began
    for each in (server, plain):
        each.stop()
    unmarked_s = _start(bench, server)
    began = time.monotonic()
    sql = UNMARKED.format(schema=schema, block=BLOCK_KEYS)
    while asyncio.run(fetch_value(server.reachable_dsn(), sql)):
        time.sleep(0.2)
        if time.monotonic() - began > LIMIT_S:
            raise BenchError("blocks of settled messages are not marked")
    mark_s = time.monotonic() - began
    for each in (server, plain):
        if each is plain:
            each.start(fresh=False)
        bench.client.run(each, RETENTION_QUEUE, "--mode", "send", "--window", 1000, "--count", live)
        each.stop()
    with_s, without_s = [], []
    for _ in range(max(3, bench.rounds)):
        without_s.append(_start(bench, plain))
        plain.stop()
        with_s.append(_start(bench, server))
        server.stop()
    kept = blocks * BLOCK_KEYS
    return {
        "kept": kept,
        "fill_s": fill_s,
        "unmarked_start_s": unmarked_s,
        "mark_rate": kept / mark_s,
        "start_s": statistics.median(with_s),
        "plain_start_s": statistics.median(without_s),
        "start_ratio": statistics.median(
            kept_s / plain_s for kept_s, plain_s in zip(with_s, without_s, strict=True)
        ),
        "starts_s": with_s,
        "plain_starts_s": without_s,
    }


def _settle_some(bench: Bench, server: Postbus) -> None:
    options = ("--mode", "both", "--count", 100, "--size", BODY_BYTES)
    bench.client.run(server, RETENTION_QUEUE, *options)


def _start(bench: Bench, server: Postbus) -> float:
    return seconds_to_accept(bench, server, fresh=False, queue=RETENTION_QUEUE)


def _schema_of(server: Postbus) -> str:
    """Return the schema of the partition that has settled rows."""
    dsn = server.reachable_dsn()
    schemas = str(asyncio.run(fetch_value(dsn, SCHEMAS))).split()
    for schema in schemas:
        if asyncio.run(fetch_value(dsn, HAS_SETTLED.format(schema=schema))):
            return schema
    raise BenchError("no message was settled")


HISTORY_ROWS: tuple[Row, ...] = (
    Row(
        "kept-start",
        "start over 10 M kept messages",
        _start_over_kept,
        (
            Metric("start_ratio", "start, of one without them", "", is_better_high=False),
            Metric("start_s", "first accepted", "s", is_better_high=False),
            Metric("plain_start_s", "without kept messages", "s", is_better_high=False),
            Metric("unmarked_start_s", "before blocks were marked", "s", is_better_high=False),
            Metric("mark_rate", "marked", "msg/s"),
        ),
        (Demand("start_ratio", None, 1.5, 1.1),),
        is_interleaved=False,
        is_default=False,
        only="postbus",
        documents=document("Queue", RETENTION_QUEUE, OWNER, HISTORY),
    ),
)
