"""Fixtures of the tests of the store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from postbus.store.postgres import Store


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["pipelined", "statements"]
)
async def store(database: str, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Each test runs with both ways to send a commit; `make test-store` has the second one."""
    opened = Store(database, pipelined=request.param)
    yield opened
    await opened.close()
