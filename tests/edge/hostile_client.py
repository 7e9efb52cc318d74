"""A raw client that sends invalid frames, beside one well-behaved link of its own."""

from __future__ import annotations

from postbus.message.codec import (
    Described,
    Symbol,
    Ulong,
    Value,
    decode_value,
    encode_value,
)
from tests.edge.amqp.test_transactions import (
    TransactionClient,
)
from tests.edge.bus_thread import BusThread
from tests.edge.raw_client import (
    ACCEPTED,
    REJECTED,
    TRANSFER,
    described,
    message,
)

RETRYABLE = {"com.microsoft:server-busy", "com.microsoft:timeout", "amqp:internal-error"}
"""Conditions on which a client would repeat the same wrong request."""

WITNESS, ANSWERS, REQUESTS = 0, 100, 200
"""Handles of links; those of requests are followed by one for each node."""


class HostileClient(TransactionClient):
    """Asks wrong things on links of its own, beside one link that behaves."""

    def __init__(self, bus: BusThread) -> None:
        super().__init__(bus)
        self._bus = bus
        self._nodes: list[str] = []
        self.witness = bus.queue()
        self.attach_sender(self.witness, WITNESS)
        self._sent = 0

    def check(self) -> None:
        """Check that the connection and its other links still work."""
        delivery_id = self.next_id()
        self.write(self.transfer(delivery_id, message(b"witness"), handle=WITNESS))
        assert int(self.state_of(delivery_id).descriptor) == ACCEPTED
        self._sent += 1
        assert self._bus.counts(self.witness).active == self._sent

    def ask(
        self, path: str, operation: str, body: Value, **properties: Value
    ) -> tuple[int, str, Value]:
        """Send a management request; return status, condition or text, and body."""
        if path not in self._nodes:
            self._nodes.append(path)
            number = self._nodes.index(path)
            node = f"{path}/$management"
            self.attach_receiver(node, ANSWERS + number)
            self.attach_sender(node, REQUESTS + number)
            self.write(self.flow(10_000, handle=ANSWERS + number))
        number = self._nodes.index(path)
        fields = {"operation": f"com.microsoft:{operation}", **properties}
        payload = (
            encode_value(described(0x73, "id", None, None, None, "answers"))
            + encode_value(Described(Ulong(0x74), fields))
            + encode_value(Described(Ulong(0x77), body))
        )
        delivery_id, handle = self.next_id(), REQUESTS + number
        self.write_in_frames(delivery_id, payload, handle, settled=True)
        answer = self.answer()
        _, at = decode_value(answer)
        found, at = decode_value(answer, at)
        body, _ = decode_value(answer, at)
        status = int(found.value["statusCode"])
        if status >= 300:
            assert isinstance(found.value["errorCondition"], Symbol)
            assert "TrackingId" in found.value["statusDescription"]
            return status, str(found.value["errorCondition"]), found.value["statusDescription"]
        return status, "", body.value

    def write_in_frames(
        self, delivery_id: int, payload: bytes, handle: int, *, settled: bool = False
    ) -> None:
        ends = range(30_000, len(payload) + 30_000, 30_000)
        for end in ends:
            piece, more = payload[end - 30_000 : end], end < len(payload)
            self.write(self.transfer(delivery_id, piece, handle=handle, settled=settled, more=more))

    def answer(self) -> bytes:
        """Read one whole message."""
        payload = b""
        while True:
            part = self.expect(TRANSFER)
            payload += part.payload
            if not part.fields[5]:
                return payload

    def send_bytes(self, payload: bytes, handle: int) -> str | None:
        """Send a message; return the condition of its refusal, None when it was accepted."""
        delivery_id = self.next_id()
        self.write_in_frames(delivery_id, payload, handle)
        state = self.state_of(delivery_id)
        if int(state.descriptor) == ACCEPTED:
            return None
        assert int(state.descriptor) == REJECTED
        name, text, _ = state.value[0].value
        assert "TrackingId" in text
        assert str(name) not in RETRYABLE
        return str(name)


def settle(hostile: HostileClient, path: str, *tokens: Value, **fields: Value) -> tuple[int, str]:
    body = {"disposition-status": "completed", "lock-tokens": list(tokens), **fields}
    status, name, _ = hostile.ask(path, "update-disposition", body)
    return status, name
