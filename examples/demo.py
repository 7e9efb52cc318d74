"""Start a bus, use every feature of queues once, and check every result.

`make demo` runs it. It starts `postbus dev` on `examples/` with an embedded Postgres in a temporary
folder, uses it with the official Azure SDK, restarts it in the middle, and stops it. The exit code
is 0 only if every body, reason and count is as expected.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from azure.core.exceptions import AzureError
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)

EXAMPLES = Path(__file__).resolve().parent
QUEUE = "orders"
START_S = 60.0
WAIT_S = 10
COUNT = 200


class DemoError(Exception):
    """A result differs from the promised one."""


def expect(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise DemoError(f"{what}: expected {expected!r}, got {actual!r}")


def passed(text: str) -> None:
    print(f"  ok  {text}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- the bus ------------------------------------------------------------------------------------


@contextmanager
def running_bus(folder: Path, port: int) -> Iterator[str]:
    """Run `postbus dev` until the block ends; yields the connection string that it prints."""
    command = [sys.executable, "-m", "postbus", "dev", str(EXAMPLES), "--data", str(folder)]
    command += ["--port", str(port), "--tls-port", "0", "--http-port", "0", "--metrics-port", "0"]
    command += ["--control-port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent
    )
    assert process.stdout is not None
    assert process.stderr is not None
    complaints: list[str] = []
    reader = threading.Thread(target=complaints.extend, args=(process.stderr,), daemon=True)
    reader.start()
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        connection_string = ""
        for line in process.stdout:
            found = re.match(r"Endpoint=sb://\S+", line)
            connection_string = found.group() if found else connection_string
            if line.startswith("ready"):
                break
        else:
            reader.join(5)
            raise DemoError("the bus did not start")
        watchdog.cancel()
        yield connection_string
    except (DemoError, AzureError):
        print("".join(complaints[-40:]), file=sys.stderr)
        raise
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        code = process.wait(START_S)
    expect("exit code of the bus", code, 0)


# --- features -----------------------------------------------------------------------------------


def receive(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Receive exactly `count` messages."""
    messages: list[ServiceBusReceivedMessage] = []
    deadline = time.monotonic() + 60
    while len(messages) < count and time.monotonic() < deadline:
        messages += receiver.receive_messages(count - len(messages), max_wait_time=WAIT_S)
    expect("number of messages", len(messages), count)
    return messages


def expect_empty(receiver: ServiceBusReceiver, what: str) -> None:
    expect(what, [str(message) for message in receiver.receive_messages(1, max_wait_time=1)], [])


def send_all(client: ServiceBusClient) -> None:
    with client.get_queue_sender(QUEUE) as sender:
        sender.send_messages(
            [
                ServiceBusMessage(
                    f"order {number}",
                    message_id=f"id-{number}",
                    application_properties={"number": number},
                )
                for number in range(COUNT)
            ]
        )
    passed(f"sent {COUNT} messages; each was stored before it was confirmed to the SDK")


def receive_all(client: ServiceBusClient) -> None:
    """Complete all but three: one is abandoned, one deferred, one dead-lettered."""
    with client.get_queue_receiver(QUEUE) as receiver:
        for number, message in enumerate(receive(receiver, COUNT)):
            expect("body", str(message), f"order {number}")
            expect("message id", message.message_id, f"id-{number}")
            expect("delivery count", message.delivery_count, 0)
            if number == 0:
                receiver.abandon_message(message)
            elif number == 1:
                receiver.defer_message(message)
                deferred = message.sequence_number
            elif number == 2:
                receiver.dead_letter_message(message, reason="no-address", error_description="no")
            else:
                receiver.complete_message(message)
        passed(f"received them in order, completed {COUNT - 3}")

        (again,) = receive(receiver, 1)
        expect("abandoned message", (str(again), again.delivery_count), ("order 0", 1))
        receiver.complete_message(again)
        passed("the abandoned one was delivered again at once, with its delivery counted")

        assert deferred is not None
        (kept,) = receiver.receive_deferred_messages(deferred)
        expect("deferred message", str(kept), "order 1")
        receiver.complete_message(kept)
        passed("the deferred one was received by its number")
        expect_empty(receiver, "queue after all were completed")


def resend_dead_letter(client: ServiceBusClient) -> None:
    with (
        client.get_queue_receiver(QUEUE, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead,
        client.get_queue_sender(QUEUE) as sender,
    ):
        (letter,) = receive(dead, 1)
        expect(
            "dead letter",
            (str(letter), letter.dead_letter_reason, letter.dead_letter_error_description),
            ("order 2", "no-address", "no"),
        )
        sender.send_messages(ServiceBusMessage(str(letter), message_id=letter.message_id))
        dead.complete_message(letter)
        expect_empty(dead, "dead-letter queue after the resend")
    with client.get_queue_receiver(QUEUE) as receiver:
        (resent,) = receive(receiver, 1)
        expect("resent message", (str(resent), resent.delivery_count), ("order 2", 0))
        receiver.complete_message(resent)
        expect_empty(receiver, "queue after the resend")
    passed("the dead letter had its reason, was resent and processed")


def exhaust_deliveries(client: ServiceBusClient) -> None:
    with client.get_queue_sender(QUEUE) as sender:
        sender.send_messages(ServiceBusMessage("poison"))
    with client.get_queue_receiver(QUEUE) as receiver:
        for attempt in range(5):
            (message,) = receive(receiver, 1)
            expect("delivery count", message.delivery_count, attempt)
            receiver.abandon_message(message)
        expect_empty(receiver, "queue after five deliveries")
    with client.get_queue_receiver(QUEUE, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead:
        (letter,) = receive(dead, 1)
        expect("reason", letter.dead_letter_reason, "MaxDeliveryCountExceeded")
        dead.complete_message(letter)
    passed("a message that failed five times was dead-lettered, as its queue requires")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="postbus-demo-"))
    port = free_port()
    try:
        print(f"starting a bus from {EXAMPLES.name}/ with its own Postgres …", flush=True)
        with (
            running_bus(folder, port) as connection_string,
            ServiceBusClient.from_connection_string(connection_string) as client,
        ):
            send_all(client)
            receive_all(client)
            resend_dead_letter(client)
            exhaust_deliveries(client)
            with client.get_queue_sender(QUEUE) as sender:
                sender.send_messages(ServiceBusMessage("still there?"))
        print("stopping and starting again …", flush=True)
        with running_bus(folder, port) as connection_string:
            with (
                ServiceBusClient.from_connection_string(connection_string) as client,
                client.get_queue_receiver(QUEUE) as receiver,
            ):
                (message,) = receive(receiver, 1)
                expect("message after the restart", str(message), "still there?")
                receiver.complete_message(message)
            passed("the message sent before the restart was there")
            print(f"\nconnection string of a running bus (`make dev`):\n{connection_string}")
    except (DemoError, AzureError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\ndemo passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
