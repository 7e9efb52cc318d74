"""Kill -9 of broker and Postgres under load through the official SDK, with a checker.

    python tests/faults/kill_nine.py --kills 50 --messages 1000000

Senders and receivers run here, the broker and Postgres in other processes. Each accepted message
id, each confirmed completion and each delivery is recorded; after the last kill what is left is
peeked and the record checked: nothing accepted is lost or doubled, nothing completed comes back,
delivery counts keep their promise. A send whose answer was lost may have been stored or not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusError

from postbus.embedded import EmbeddedPostgres

QUEUE = "kills"
KEY = "kill-test-key"
BACKLOG = 3_000
"""Senders wait while more messages than this are not completed yet."""

MANIFEST = f"""
apiVersion: v1
kind: Secret
metadata: {{name: root-key}}
stringData: {{primaryKey: {KEY}}}
---
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {{name: faults}}
spec:
  sku: {{name: Standard}}
  authorizationRules:
    - {{name: RootManageSharedAccessKey, rights: [Manage], secretName: root-key}}
---
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {{name: {QUEUE}}}
spec: {{owner: {{name: faults}}, lockDuration: PT10S, maxDeliveryCount: 1000}}
"""


@dataclass(slots=True)
class History:
    """What the clients saw. Times are monotonic seconds of this process."""

    accepted: set[str] = field(default_factory=set)
    in_doubt: set[str] = field(default_factory=set)
    completed: dict[str, float] = field(default_factory=dict)
    deliveries: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    in_flight: int = 0
    kills: int = 0
    in_flight_at_kills: list[int] = field(default_factory=list)

    def delivered(self, message: ServiceBusReceivedMessage, started: float) -> None:
        """Check a delivery against what is known; `started`: when its receive call began."""
        message_id = str(message.message_id)
        completed_at = self.completed.get(message_id)
        if completed_at is not None and completed_at < started:
            self.problems.append(f"I2: {message_id} delivered after its completion was confirmed")
        # A kill may cut off one delivery the client never saw, or one the tables never saw (D6).
        seen, told = self.deliveries[message_id], message.delivery_count or 0
        if abs(told - seen) > self.kills:
            self.problems.append(
                f"I8: {message_id} tells {told} earlier deliveries, {seen} were seen"
            )
        self.deliveries[message_id] += 1

    def check(self, drained: list[str]) -> None:
        """Compare with what was left in the queue; adds to `problems`."""
        twice = [key for key, count in Counter(drained).items() if count > 1]
        if twice:
            self.problems.append(f"I1: {len(twice)} messages stored twice, e.g. {twice[0]}")
        left = set(drained)
        lost = self.accepted - left - set(self.completed) - self.in_doubt
        if lost:
            self.problems.append(f"I1: {len(lost)} accepted messages lost, e.g. {min(lost)}")
        back = left & set(self.completed)
        if back:
            self.problems.append(f"I2: {len(back)} completed messages came back, e.g. {min(back)}")


class Processes:
    """Postgres and the broker as child processes of this script."""

    def __init__(self, folder: Path, program: list[str]) -> None:
        self.program = program
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.postgres = EmbeddedPostgres(folder / "postgres")
        self.broker: subprocess.Popen[bytes] | None = None
        (folder / "manifests.yaml").write_text(MANIFEST)

    def start_broker(self) -> None:
        command = [sys.executable, *self.program, "serve", str(self.folder / "manifests.yaml")]
        environment = os.environ | {
            "POSTBUS_STORES": self.postgres.dsn,
            "POSTBUS_HOST": "127.0.0.1",
            "POSTBUS_PORT": str(self.port),
            "POSTBUS_TLS_PORT": "0",
            "POSTBUS_METRICS_PORT": "0",
            "POSTBUS_DATA": str(self.folder / "broker"),
        }
        with (self.folder / "broker.log").open("ab") as log:
            self.broker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill_broker(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker.wait()

    def kill_postgres(self) -> None:
        os.kill(self.postgres.pid, signal.SIGKILL)

    @property
    def connection_string(self) -> str:
        return (
            f"Endpoint=sb://localhost:{self.port};SharedAccessKeyName=RootManageSharedAccessKey;"
            f"SharedAccessKey={KEY};UseDevelopmentEmulator=true;"
        )


async def send_forever(
    client: ServiceBusClient, history: History, numbers: itertools.count[int], until: asyncio.Event
) -> None:
    """Send batches; what raised is in doubt, what returned is accepted."""
    while not until.is_set():
        try:
            async with client.get_queue_sender(QUEUE) as sender:
                while not until.is_set():
                    if len(history.accepted) - len(history.completed) > BACKLOG:
                        await asyncio.sleep(0.02)
                        continue
                    ids = [f"m{next(numbers)}" for _ in range(random.randint(1, 40))]
                    history.in_doubt.update(ids)
                    history.in_flight += len(ids)
                    try:
                        batch = [ServiceBusMessage(b"x" * 200, message_id=key) for key in ids]
                        await sender.send_messages(batch)
                        history.accepted.update(ids)
                        history.in_doubt.difference_update(ids)
                    finally:
                        history.in_flight -= len(ids)
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def settle(
    receiver: ServiceBusReceiver, message: ServiceBusReceivedMessage, history: History
) -> None:
    history.in_flight += 1
    message_id = str(message.message_id)
    try:
        if random.random() < 0.05:
            await receiver.abandon_message(message)
        else:
            await receiver.complete_message(message)
            history.completed[message_id] = time.monotonic()
    except MessageLockLostError:
        pass  # allowed after a restart: the message is delivered again
    finally:
        history.in_flight -= 1


async def receive_forever(client: ServiceBusClient, history: History, until: asyncio.Event) -> None:
    while not until.is_set():
        try:
            async with client.get_queue_receiver(QUEUE) as receiver:
                while not until.is_set():
                    started = time.monotonic()
                    messages = await receiver.receive_messages(100, max_wait_time=1)
                    for message in messages:
                        history.delivered(message, started)
                    await asyncio.gather(*(settle(receiver, one, history) for one in messages))
        except (ServiceBusError, OSError, ValueError):
            await asyncio.sleep(0.2)


async def drain(connection_string: str) -> list[str]:
    """Peek everything that is left, in every state."""
    found: list[str] = []
    async with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        number = 1
        while page := await receiver.peek_messages(500, sequence_number=number):
            found += [str(message.message_id) for message in page]
            number = (page[-1].sequence_number or 0) + 1
    return found


async def wait_for_port(port: int, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return


async def run(kills: int, messages: int, seed: int, folder: Path, program: list[str]) -> History:
    """Drive the load, kill as often as asked, drain and check."""
    random.seed(seed)
    history, processes = History(), Processes(folder, program)
    processes.postgres.start()
    processes.start_broker()
    await wait_for_port(processes.port)
    until, numbers = asyncio.Event(), itertools.count(1)
    clients = [
        ServiceBusClient.from_connection_string(processes.connection_string, retry_total=0)
        for _ in range(8)
    ]
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(send_forever(client, history, numbers, until))
            tasks.create_task(receive_forever(client, history, until))
        for kill in range(kills):
            target = messages * (kill + 1) // (kills + 1)
            async with asyncio.timeout(600):
                while len(history.accepted) < target or history.in_flight < 100:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(random.random() * 0.5)
            history.in_flight_at_kills.append(history.in_flight)
            history.kills += 1
            if kill % 2:
                processes.kill_postgres()
                processes.postgres.restart()
            else:
                processes.kill_broker()
                processes.start_broker()
                if random.random() < 0.3:  # once more while it loads
                    await asyncio.sleep(random.random())
                    history.kills += 1
                    processes.kill_broker()
                    processes.start_broker()
                await wait_for_port(processes.port)
            print(
                f"kill {kill + 1}/{kills}: accepted {len(history.accepted)}, completed "
                f"{len(history.completed)}, in flight {history.in_flight_at_kills[-1]}",
                flush=True,
            )
        while len(history.accepted) < messages:
            await asyncio.sleep(0.05)
        until.set()
    for client in clients:
        await client.close()
    history.check(await drain(processes.connection_string))
    assert processes.broker is not None
    processes.broker.terminate()
    processes.broker.wait(30)
    processes.postgres.stop()
    return history


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", help="another program than `-m postbus` to run as the broker")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="postbus-kill-") as folder:
        os.chmod(folder, 0o755)
        program = [options.broker] if options.broker else ["-m", "postbus"]
        history = asyncio.run(
            run(options.kills, options.messages, options.seed, Path(folder), program)
        )
    print(
        f"accepted {len(history.accepted)}, completed {len(history.completed)}, in doubt "
        f"{len(history.in_doubt)}, problems {len(history.problems)}"
    )
    for problem in history.problems[:20]:
        print(problem)
    return 1 if history.problems else 0


if __name__ == "__main__":
    sys.exit(main())
