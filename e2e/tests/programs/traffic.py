"""Send to a queue and receive from it all the time, in a pod, and account for each message.

    python traffic.py FOLDER [SESSION]

FOLDER is the mounted Secret: connectionString, entityPath, ca.crt. With SESSION all messages are of
that session, so that their order is promised.


Ends when /tmp/end exists, one more message was accepted and the queue is empty; the last line that
it writes is the account.
A send is never repeated: what was refused or got no answer is left, and the next message has a new
id. So a message that was accepted must arrive, one that was completed must not arrive again, and
none may arrive that was refused. Each client serves a few seconds, the next one reads the Secret
again, as an application does whose pod starts.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from azure.servicebus import ServiceBusClient, ServiceBusMessage

PACE_S = 0.02
CLIENT_S = 4.0
SEND_S = 3.0
"""Time limit of a send; what takes longer is counted as refused."""

IDLE_S = 6.0
"""The queue is empty if nothing arrived for this time after the last send."""

END = Path("/tmp/end")


@dataclass
class Account:
    accepted: dict[str, float] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    received: Counter[str] = field(default_factory=Counter)
    completed: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    """Received after its completion had been confirmed."""

    disordered: list[str] = field(default_factory=list)
    """Received for the first time after one that was sent later."""

    newest: int = -1
    troubles: list[tuple[float, str]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and length of each time without an accepted message."""

    delivery_gap: float = 0.0
    last_sent: float | None = None
    """When the last message was accepted; None before the end."""

    def note(self, where: str, error: Exception) -> None:
        text = f"{where}: {type(error).__name__}: {error}"[:240]
        self.troubles.append((round(time.time(), 2), text))

    def arrive(self, number: str) -> None:
        self.received[number] += 1
        if number in self.completed:
            self.again.add(number)
        if self.received[number] == 1 and int(number) < self.newest:
            self.disordered.append(number)
        self.newest = max(self.newest, int(number))

    def summary(self) -> dict[str, object]:
        lost = sorted(set(self.accepted) - set(self.received), key=int)
        return {
            "accepted": len(self.accepted),
            "unknown": len(self.unknown),
            "received": len(self.received),
            "lost": lost[:20],
            "completed_twice": sorted(self.again)[:20],
            "strange": sorted(set(self.received) - set(self.accepted) - self.unknown)[:20],
            "disordered": self.disordered[:20],
            "redelivered": sum(count > 1 for count in self.received.values()),
            "gaps": [gap for gap in self.gaps if gap[1] > 0.5],
            "refused_for": max((length for _, length in self.gaps), default=0.0),
            "not_delivered_for": round(self.delivery_gap, 2),
            "troubles": self.troubles[:60],
        }


def client_of(folder: Path) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(
        (folder / "connectionString").read_text(),
        connection_verify=str(folder / "ca.crt"),
        retry_total=0,
    )


def send(folder: Path, queue: str, session: str | None, account: Account) -> None:
    numbers = itertools.count()
    last = time.monotonic()
    while True:
        try:
            with client_of(folder) as client, client.get_queue_sender(queue) as sender:
                until = time.monotonic() + CLIENT_S
                while time.monotonic() < until:
                    number = str(next(numbers))
                    account.unknown.add(number)
                    sender.send_messages(
                        ServiceBusMessage(number, message_id=number, session_id=session),
                        timeout=SEND_S,
                    )
                    account.unknown.discard(number)
                    now = time.monotonic()
                    account.accepted[number] = now
                    if now - last > 10 * PACE_S:
                        account.gaps.append(
                            (round(time.time() - (now - last), 2), round(now - last, 2))
                        )
                    last = now
                    if END.exists():
                        account.last_sent = now
                        return
                    time.sleep(PACE_S)
        except Exception as error:  # noqa: BLE001 - all are in the account
            account.note("send", error)
            time.sleep(0.1)


def receive(folder: Path, queue: str, session: str | None, account: Account) -> None:
    last = time.monotonic()
    # The SDK releases what arrives while it settles another message, and gets it after later ones.
    size = 1 if session else 20
    while True:
        try:
            with (
                client_of(folder) as client,
                client.get_queue_receiver(queue, session_id=session) as receiver,
            ):
                until = time.monotonic() + CLIENT_S
                while time.monotonic() < until:
                    for message in receiver.receive_messages(size, max_wait_time=1):
                        now = time.monotonic()
                        account.delivery_gap = max(account.delivery_gap, now - last)
                        last = now
                        number = str(message)
                        account.arrive(number)
                        receiver.complete_message(message)
                        account.completed.add(number)
                    ended = account.last_sent
                    if ended is not None and time.monotonic() - max(last, ended) > IDLE_S:
                        return
        except Exception as error:  # noqa: BLE001 - as above
            account.note("receive", error)
            time.sleep(0.1)


def main(folder: Path, session: str | None = None) -> None:
    queue = (folder / "entityPath").read_text()
    account = Account()
    threads = [
        threading.Thread(target=work, args=(folder, queue, session, account))
        for work in (send, receive)
    ]
    for thread in threads:
        thread.start()
    while len(account.completed) < 20:
        time.sleep(0.1)
    print("under way")
    for thread in threads:
        thread.join()
    print(json.dumps(account.summary()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
