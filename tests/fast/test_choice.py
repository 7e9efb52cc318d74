"""The build in use is the one that POSTBUS_ACCELERATE names."""

from __future__ import annotations

import os
from pathlib import Path

from postbus import fast
from postbus.amqp import runs as frame_runs
from postbus.entity.queues import runs as queue_runs
from postbus.message import runs as message_runs


def test_required_functions_in_c_are_in_use() -> None:
    """`make test-accelerated` sets `require`: without this its tests would pass in Python alone."""
    if os.environ.get("POSTBUS_ACCELERATE") == "require":
        assert fast.IS_ACCELERATED
        from postbus.fast import _runs

        assert Path(_runs.__file__).parent == Path(fast.__file__).parent
    users = (
        vars(frame_runs)["IS_ACCELERATED"],
        message_runs.in_c is not None,
        queue_runs.in_c is not None,
    )
    assert users == (fast.IS_ACCELERATED,) * 3
