"""Looks run side by side, up to the number of workers, and what fails leaves the rest alone."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from postbus_operator.context import LeadershipLost
from postbus_operator.objects import Key
from postbus_operator.running.work_loop import WorkLoop
from postbus_operator.running.work_queue import WorkQueue

KEYS = [Key("Queue", "shop", str(number)) for number in range(20)]


def loop_of(look, *, workers: int = 4) -> tuple[WorkLoop, list]:
    times: list = []
    loop = WorkLoop(
        WorkQueue(random.Random(1)),
        look,
        workers=workers,
        now=time.monotonic,
        on_times=lambda key, waited, took: times.append((key, waited, took)),
    )
    return loop, times


async def wait_until(check) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.005)


async def test_no_more_looks_run_than_there_are_workers() -> None:
    running, most, done = 0, 0, []
    gate = asyncio.Event()

    async def look(key: Key) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        done.append(key)

    loop, times = loop_of(look)
    for key in KEYS:
        loop.wake(key)
    task = asyncio.create_task(loop.run())
    await wait_until(lambda: running == 4)
    gate.set()
    await wait_until(lambda: len(done) == len(KEYS))
    task.cancel()
    assert (most, sorted(done)) == (4, sorted(KEYS))
    assert len(times) == len(KEYS)


async def test_a_look_asks_for_the_next_one() -> None:
    looks = []

    async def look(key: Key) -> float | None:
        looks.append(key)
        return 0.01 if len(looks) < 3 else None

    loop, _ = loop_of(look)
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(0)
    loop.wake(KEYS[0], 0.01)
    await wait_until(lambda: len(looks) == 3)
    task.cancel()
    assert looks == [KEYS[0]] * 3


async def test_a_resync_looks_at_everything_again() -> None:
    looks = []

    async def look(key: Key) -> None:
        looks.append(key)

    loop, _ = loop_of(look)
    tasks = [
        asyncio.create_task(loop.run()),
        asyncio.create_task(loop.resync(lambda: KEYS[:3], 0.1, lambda _: False)),
    ]
    await wait_until(lambda: all(looks.count(key) >= 2 for key in KEYS[:3]))
    for task in tasks:
        task.cancel()


async def test_a_resync_leaves_out_what_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postbus_operator.running.work_loop.STRIDE_S", 0.01)
    looks, asked = [], []

    async def look(key: Key) -> None:
        looks.append(key)

    def is_settled(key: Key) -> bool:
        asked.append((key, time.monotonic()))
        return key != KEYS[7]

    loop, _ = loop_of(look)
    tasks = [
        asyncio.create_task(loop.run()),
        asyncio.create_task(loop.resync(lambda: KEYS, 0.1, is_settled)),
    ]
    await wait_until(lambda: len(looks) == 2)
    for task in tasks:
        task.cancel()
    assert looks == [KEYS[7]] * 2
    assert [key for key, _ in asked[: len(KEYS)]] == KEYS
    first, last = asked[0][1], asked[len(KEYS) - 1][1]
    assert last - first > 0.05  # not all at once


async def test_the_loss_of_leadership_cancels_all_looks() -> None:
    cancelled = []

    async def look(key: Key) -> None:
        if key == KEYS[0]:
            raise LeadershipLost("newer leader")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(key)
            raise

    loop, _ = loop_of(look)
    for key in (*KEYS[1:3], KEYS[0]):
        loop.wake(key)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await loop.run()
    assert isinstance(caught.value.exceptions[0], LeadershipLost)
    assert sorted(cancelled) == KEYS[1:3]
