"""Send, receive and complete all the time, in a pod, and write a record of it: a line each.

    python client_program.py FOLDER      the mounted Secret of a whole bus

The record is /tmp/record; e2e/faults/record.py reads its lines, which are lists:

    sent       path, message, session, result, started, ended
    delivered  path, message, at, sequence number, delivery count, lock token, hold
    settled    path, message, lock token, result, started, ended
    left       path, place, message, sequence number, delivery count, dead-letter reason
    seen       path, place: all that was left there has its line
    trouble    at, where, text

A request that raised is unknown: its work was done or not. No send is repeated, each message has a
number of its own. When /tmp/end exists sending stops; when /tmp/peek exists receiving stops too,
what is left is written, and then the line `end`.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSubQueue

CLIENT_S = 10.0
"""Each client serves this long; the next one reads the Secret again, as in a pod that starts."""

SEND_S = 3.0
BATCH = 20
END, PEEK = Path("/tmp/end"), Path("/tmp/peek")

SENDERS = (("plain", (None,), 0.08), ("ordered", ("a", "b"), 0.08), ("events", (None,), 0.16))
"""Path, sessions by turns, pause between messages in seconds."""

RECEIVERS = (("plain", None), ("ordered", "a"), ("ordered", "b"), ("events/all", None))


class Record:
    """The file; threads write whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._lock = threading.Lock()

    def write(self, *line: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def trouble(self, where: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        self.write("trouble", time.time(), where, text[:240])


def client_of(folder: Path) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(
        (folder / "connectionString").read_text(),
        connection_verify=str(folder / "ca.crt"),
        retry_total=0,
    )


def send(folder: Path, record: Record, path: str, sessions: tuple[str | None, ...], pause: float):
    turns = zip(itertools.count(), itertools.cycle(sessions), strict=False)

    def one_client(client: ServiceBusClient) -> None:
        is_topic = path == "events"
        made = client.get_topic_sender(path) if is_topic else client.get_queue_sender(path)
        until = time.monotonic() + CLIENT_S
        with made as sender:
            while time.monotonic() < until and not END.exists():
                number, session = next(turns)
                message = ServiceBusMessage(str(number), session_id=session)
                started, result = time.time(), "unknown"
                try:
                    sender.send_messages(message, timeout=SEND_S)
                    result = "accepted"
                finally:
                    record.write("sent", path, str(number), session, result, started, time.time())
                time.sleep(pause)

    repeat(folder, record, f"send {path}", END, one_client)


def receive(folder: Path, record: Record, path: str, session: str | None, holds: Any):
    def one_client(client: ServiceBusClient) -> None:
        hold = next(holds) if session else None
        until = time.monotonic() + CLIENT_S
        with receiver_of(client, path, session) as receiver:
            while time.monotonic() < until and not PEEK.exists():
                batch = receiver.receive_messages(BATCH, max_wait_time=1)
                for message in batch:
                    record.write(
                        "delivered", path, str(message), time.time(), message.sequence_number,
                        message.delivery_count, str(message.lock_token or hold), hold,
                    )  # fmt: skip
                for message in batch:
                    complete(receiver, record, path, message, str(message.lock_token or hold))

    repeat(folder, record, f"receive {path}", PEEK, one_client)


def complete(receiver: Any, record: Record, path: str, message: Any, token: str) -> None:
    started, result = time.time(), "unknown"
    try:
        receiver.complete_message(message)
        result = "accepted"
    finally:
        record.write("settled", path, str(message), token, result, started, time.time())


def receiver_of(client: ServiceBusClient, path: str, session: str | None, **options: Any) -> Any:
    topic, _, subscription = path.partition("/")
    if session is not None:
        # Without a buffer the SDK releases what arrives while it settles: later ones overtake it.
        options |= {"session_id": session, "max_wait_time": 5, "prefetch_count": BATCH}
    if subscription:
        return client.get_subscription_receiver(topic, subscription, **options)
    return client.get_queue_receiver(path, **options)


def repeat(
    folder: Path, record: Record, where: str, end: Path, work: Callable[[ServiceBusClient], None]
) -> None:
    while not end.exists():
        try:
            with client_of(folder) as client:
                work(client)
        except Exception as error:  # noqa: BLE001 - all are in the record
            record.trouble(where, error)
            time.sleep(0.1)


def peek(folder: Path, record: Record) -> None:
    """Write what is left in each place. Raises if a place cannot be seen."""
    with client_of(folder) as client:
        for path in sorted({path for path, _ in RECEIVERS}):
            session = "a" if path == "ordered" else None
            for held in ("a", "b") if session else (None,):
                with receiver_of(client, path, held) as receiver:
                    write_left(record, path, "active", receiver)
            dead = receiver_of(client, path, None, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
            with dead as receiver:
                write_left(record, path, "dead-letter", receiver)


def write_left(record: Record, path: str, place: str, receiver: Any) -> None:
    found = receiver.peek_messages(250, sequence_number=1)
    for message in found:
        record.write(
            "left", path, place, str(message), message.sequence_number, message.delivery_count,
            message.dead_letter_reason,
        )  # fmt: skip
    record.write("seen", path, place)


def main(folder: Path) -> None:
    record = Record(Path("/tmp/record"))
    holds = itertools.count(1)
    threads = [
        *(threading.Thread(target=send, args=(folder, record, *each)) for each in SENDERS),
        *(
            threading.Thread(target=receive, args=(folder, record, *each, holds))
            for each in RECEIVERS
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peek(folder, record)
    record.write("end")
    # Kubelet removes the volumes of a pod that has ended.
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
