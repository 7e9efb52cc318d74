"""A queue of a real bus with a reader group, as an operator of a lake sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import MessageSizeExceededError

from postbus.contract.bulk import ReadableRanges, ReaderGroup
from postbus_spark.client import GroupClient
from postbus_spark.options import Options, read_options
from postbus_spark.tokens import Credentials
from postbus_spark.transport import Bus, call
from tests.edge.bus_thread import RULES, BusThread

GROUP = "lake"
LISTENER = next(rule for rule in RULES if rule.name == "listener")
KEYS = [rule.keys.primary for rule in RULES]


class Lake:
    """Readers have the right Listen; groups are made with the root key."""

    def __init__(self, bus: BusThread, entity: str, folder: Path) -> None:
        self.bus = bus
        self.entity = entity
        self.folder = folder
        self._root = Credentials(
            f"http://localhost:{bus.port}", RULES[0].name, RULES[0].keys.primary
        )

    def manage(self, method: str, below: str, body: object = None) -> bytes:
        """Send a request with the right Manage."""
        target = f"/{self.entity}/$bulk/{below}"
        return call(Bus(self._root.base_url), method, target, self._root.token("", 4e9), body)

    def create(self, name: str = GROUP, **more: object) -> None:
        self.manage("PUT", f"groups/{name}", {"start": "earliest", **more})

    def reset(self, start: object, name: str = GROUP) -> None:
        self.manage("POST", f"groups/{name}/reset", {"start": start})

    def send(self, *bodies: bytes, entity: str = "", **fields: Any) -> None:
        """Send messages with the SDK, in as few batches as possible."""
        with self.bus.client() as client:
            name = entity or self.entity
            with client.get_queue_sender(name) as sender:
                batch = sender.create_message_batch()
                for body in bodies:
                    message = ServiceBusMessage(body, **fields)
                    try:
                        batch.add_message(message)
                    except MessageSizeExceededError:
                        sender.send_messages(batch)
                        batch = sender.create_message_batch()
                        batch.add_message(message)
                sender.send_messages(batch)

    def complete(self, count: int) -> None:
        with self.bus.client() as client, client.get_queue_receiver(self.entity) as receiver:
            while count:
                messages = receiver.receive_messages(count, max_wait_time=5)
                assert messages
                for message in messages:
                    receiver.complete_message(message)
                count -= len(messages)

    def dead_letter(self, count: int, reason: str) -> None:
        with self.bus.client() as client, client.get_queue_receiver(self.entity) as receiver:
            for _ in range(count):
                [message] = receiver.receive_messages(1, max_wait_time=5)
                receiver.dead_letter_message(message, reason=reason)

    def connection_file(self, rule: str = "listener", key: str | None = None) -> str:
        """Return a file with a connection string, as a Secret would be mounted."""
        file = self.folder / f"connection-{rule}"
        file.write_text(self.bus.connection_string(rule, key) + "\n")
        return str(file)

    def options(self, **more: str) -> dict[str, str]:
        return {
            "entity": self.entity,
            "readerGroup": GROUP,
            "connectionStringFile": self.connection_file(),
            **more,
        }

    def checked(self, **more: str) -> Options:
        return read_options(self.options(**more))

    def client(self, **more: str) -> GroupClient:
        return GroupClient(self.checked(**more))

    def group(self) -> ReaderGroup:
        return self.client().group()

    def ranges(self) -> ReadableRanges:
        return self.client().ranges(16)
