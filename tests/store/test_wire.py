"""Messages on the wire to Postgres for each commit."""

from __future__ import annotations

from collections import Counter

import pytest

from postbus.entity.outcomes import RecordAcquired
from postbus.store.postgres import Store
from tests.store.driving import connected, driven, insert, open_driven, outcome
from tests.store.relay import relaying

WRITER = "postbus writer 0"


@pytest.mark.parametrize("is_pipelined", [True, False], ids=["pipelined", "statements"])
async def test_commit_carries_no_parse(database: str, is_pipelined: bool) -> None:
    """A statement that is sent as text is parsed and planned again by each commit."""
    async with relaying(database) as (relay, dsn):
        store = Store(dsn, pipelined=is_pipelined)
        async with driven(store) as it:
            for turn in range(2):  # the first one prepares statements that few partitions need
                before = Counter(relay.client_messages[WRITER])
                for number in range(5):
                    key = 1 + 100 * (10 * turn + number)
                    await it.commit(outcome([insert(key)]))
                    await it.commit(outcome([insert(key + 1), insert(key + 2)]))
                    await it.commit(outcome([insert(key + 3)], [key]))
                    await it.commit(outcome(deletes=[key + 1]))
                    await it.commit(outcome(mutations=[RecordAcquired([key + 2], [1])]))
                    await it.commit(outcome(deletes=[key + 2, key + 3]))
                sent = relay.client_messages[WRITER] - before
            assert sent["B"] >= 30  # Bind: the commits went this way
            assert sent["P"] == 0
            assert sent["d"] == (5 if is_pipelined else 0)  # CopyData: of several rows
        await store.close()


async def test_idle_writer_holds_no_lock_of_a_table(store: Store, database: str) -> None:
    it = await open_driven(store)
    async with connected(database) as look:
        locks = await look.fetch(
            "select relation::regclass from pg_locks where locktype = 'relation' and pid = any ("
            "array(select pid from pg_stat_activity where application_name = $1))",
            WRITER,
        )
        assert locks == []
    await it.journal.close()
