from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from postbus.process.descriptors import allow_descriptors


@pytest.fixture(autouse=True)
def hard() -> Iterator[int]:
    """Give the limits back as they were; return the highest."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_limit_is_raised_and_never_lowered(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, hard))
    assert allow_descriptors(1_000) == soft() == 1_000
    assert allow_descriptors(500) == soft() == 1_000


def test_too_low_a_limit_is_logged(hard: int, caplog: pytest.LogCaptureFixture) -> None:
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no limit")
    with caplog.at_level(logging.WARNING):
        assert allow_descriptors(hard + 1) == soft() == hard
    assert "ulimit -n" in caplog.text
