"""A client in a pod that sends and receives through faults, and its account of each message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from e2e.tests.cluster import Space, wait_for
from e2e.tests.manifests import program_pod

PROGRAM: Final = Path(__file__).parent / "programs" / "traffic.py"


LOCK: Final = "PT5S"
"""Lock duration of its queue: shorter than the idle time after which the client ends. What was on
its way to a receiver that was cut off is locked so long."""


class Traffic:
    """The client; `account` is there after its end."""

    def __init__(self, space: Space, pod: str, *, has_order: bool) -> None:
        self._space, self._pod, self._has_order = space, pod, has_order
        self.account: dict[str, Any] = {}

    def end(self) -> None:
        self._space.kubectl("exec", self._pod, "--", "touch", "/tmp/end")
        self._space.wait("jsonpath={.status.phase}=Succeeded", f"pod/{self._pod}")
        self.account = json.loads(self._space.kubectl("logs", self._pod).splitlines()[-1])

    def check(self) -> None:
        """Fail if an accepted message was lost, a completed one came back, or a session has another
        order.
        """
        wrongs = ["lost", "completed_twice", "strange"]
        if self._has_order:
            wrongs.append("disordered")
        for wrong in wrongs:
            assert not self.account[wrong], self.account
        assert self.account["accepted"] > 20, self.account


@contextmanager
def traffic(
    space: Space, secret: str, pod: str = "traffic", session: str = ""
) -> Iterator[Traffic]:
    """Run the client on the queue of a Secret, which has `LOCK`, while the block runs.

    With `session` its messages are of that session, and their order is checked.
    """
    options = [session] if session else []
    space.apply(program_pod(pod, PROGRAM.read_text(), secret, *options))
    try:
        space.wait_ready(f"pod/{pod}")
        wait_for(lambda: space.kubectl("logs", pod), lambda log: "under way" in log)
        client = Traffic(space, pod, has_order=bool(session))
        yield client
        client.end()
    finally:
        space.kubectl("delete", f"pod/{pod}", "--wait=false")
