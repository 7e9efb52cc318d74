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


class Traffic:
    """The client; `account` is there after its end."""

    def __init__(self, space: Space, pod: str) -> None:
        self._space, self._pod = space, pod
        self.account: dict[str, Any] = {}

    def end(self) -> None:
        self._space.kubectl("exec", self._pod, "--", "touch", "/tmp/end")
        self._space.wait("jsonpath={.status.phase}=Succeeded", f"pod/{self._pod}")
        self.account = json.loads(self._space.kubectl("logs", self._pod).splitlines()[-1])

    def check(self) -> None:
        """Fail if an accepted message was lost, or a completed one came back."""
        for wrong in ("lost", "completed_twice", "strange"):
            assert not self.account[wrong], self.account
        assert self.account["accepted"] > 20, self.account


@contextmanager
def traffic(space: Space, secret: str, pod: str = "traffic") -> Iterator[Traffic]:
    """Run the client on the queue of a Secret while the block runs."""
    space.apply(program_pod(pod, PROGRAM.read_text(), secret))
    try:
        space.wait_ready(f"pod/{pod}")
        wait_for(lambda: space.kubectl("logs", pod), lambda log: "under way" in log)
        client = Traffic(space, pod)
        yield client
        client.end()
    finally:
        space.kubectl("delete", f"pod/{pod}", "--wait=false")
