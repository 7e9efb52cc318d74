"""A small asynchronous AMQP client with transactions, which the Python SDK lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from postbus.amqp import performatives as p
from postbus.amqp.client import ClientConnection, ClientSession
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesAnswered,
    DeliveriesUpdated,
    LinkAttached,
    LinkDetached,
    TransferReceived,
    one_by_one,
)
from postbus.amqp.limits import Limits
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import Accepted, Declared, DeliveryState, TransactionalState
from postbus.amqp.serial import SERIAL
from postbus.message.codec import Described, Ulong, encode_value

ANSWER_S = 20.0


class Refused(Exception):
    """The broker refused: the text is its condition."""


class TransactionClient:
    """One connection, one session, a link to the coordinator. Every method may raise OSError."""

    def __init__(self, engine: ClientConnection, writer: asyncio.StreamWriter) -> None:
        """Only `connect` calls this."""
        self._engine = engine
        self._writer = writer
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attached: dict[Link, asyncio.Future[None]] = {}
        self._answers: dict[tuple[str, int], asyncio.Future[DeliveryState | None]] = {}
        self.arrived: asyncio.Queue[TransferReceived] = asyncio.Queue()
        self._tag = 0
        self._session: ClientSession
        self._coordinator: OutgoingLink
        self._reading: asyncio.Task[None]

    @classmethod
    async def connect(cls, port: int, rule: str, key: str) -> TransactionClient:
        """Open a connection on loopback with SASL PLAIN."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        engine = ClientConnection(
            container_id="transactions",
            limits=Limits(),
            hostname="localhost",
            mechanism="PLAIN",
            initial_response=f"\0{rule}\0{key}".encode(),
        )
        client = cls(engine, writer)
        client._reading = asyncio.create_task(client._read(reader))
        engine.start()
        client._flush()
        async with asyncio.timeout(ANSWER_S):
            await client._opened
        client._session = engine.begin()
        client._coordinator = client._session.attach_sender(
            "coordinator", Described(Ulong(p.COORDINATOR), [])
        )
        await client._wait_for(client._coordinator)
        return client

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()

    # --- links ----------------------------------------------------------------------------------

    async def sender(self, address: str) -> OutgoingLink:
        link = self._session.attach_sender(f"to-{address}", address)
        await self._wait_for(link)
        return link

    async def receiver(self, address: str, credit: int) -> IncomingLink:
        """Attach; deliveries are added to `arrived`."""
        link = self._session.attach_receiver(f"from-{address}", address)
        await self._wait_for(link)
        link.grant(credit)
        self._flush()
        return link

    def grant(self, link: IncomingLink, credit: int) -> None:
        link.grant(credit)
        self._flush()

    # --- transactions ---------------------------------------------------------------------------

    async def declare(self) -> bytes:
        state = await self._send(self._coordinator, _request(p.DECLARE, [None]))
        if not isinstance(state, Declared):
            raise Refused(str(getattr(state, "condition", state)))
        return state.transaction_id

    async def discharge(self, transaction_id: bytes, *, fail: bool) -> None:
        """Commit or roll back; raises `Refused` when the broker rolled back."""
        state = await self._send(self._coordinator, _request(p.DISCHARGE, [transaction_id, fail]))
        _check(state)

    async def send(self, link: OutgoingLink, payload: bytes, transaction_id: bytes) -> None:
        state = await self._send(link, payload, TransactionalState(transaction_id, None))
        _check(state)

    async def complete(self, delivery_id: int, transaction_id: bytes) -> None:
        """Complete a delivery in a transaction."""
        self._session.dispose(
            delivery_id, delivery_id, TransactionalState(transaction_id, Accepted())
        )
        _check(await self._answer("receiver", delivery_id))

    # --- internals ------------------------------------------------------------------------------

    async def _send(
        self, link: OutgoingLink, payload: bytes, state: DeliveryState | None = None
    ) -> DeliveryState | None:
        self._tag += 1
        tag = self._tag.to_bytes(4, "big")
        delivery_id = _transfer(self._session, link, tag, payload, state)
        return await self._answer("sender", delivery_id)

    async def _answer(self, role: str, delivery_id: int) -> DeliveryState | None:
        future: asyncio.Future[DeliveryState | None] = asyncio.get_running_loop().create_future()
        self._answers[role, delivery_id] = future
        self._flush()
        async with asyncio.timeout(ANSWER_S):
            return await future

    async def _wait_for(self, link: Link) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attached[link] = future
        self._flush()
        async with asyncio.timeout(ANSWER_S):
            await future

    def _flush(self) -> None:
        self._writer.writelines(self._engine.data_to_send())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        error: Exception = ConnectionError("the broker hung up")
        try:
            while data := await reader.read(65_536):
                for event in one_by_one(self._engine.receive_data(data, 0)):
                    self._take(event)
                self._flush()
        except (OSError, Refused) as cause:
            error = cause
        opened: list[asyncio.Future[Any]] = [self._opened, *self._attached.values()]
        for waiting in [*opened, *self._answers.values()]:
            if not waiting.done():
                waiting.set_exception(error)
        self._writer.close()

    def _take(self, event: Any) -> None:
        match event:
            case ConnectionOpened():
                self._opened.set_result(None)
            case LinkAttached(link):
                self._attached[link].set_result(None)
            case LinkDetached(_, _, error):
                raise Refused(error.condition if error is not None else "detached")
            case ConnectionClosed():
                raise ConnectionError("the broker closed the connection")
            case TransferReceived():
                self.arrived.put_nowait(event)
            case DeliveriesAnswered(_, first, last, state, _):
                self._settle("receiver", first, last, state)
            case DeliveriesUpdated():
                for delivery_id in event.delivery_ids:
                    self._settle("sender", delivery_id, delivery_id, event.state)

    def _settle(self, role: str, first: int, last: int, state: DeliveryState | None) -> None:
        for delivery_id in range(first, last + 1):
            waiting = self._answers.pop((role, delivery_id), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(state)


def _request(code: int, fields: list[Any]) -> bytes:
    return encode_value(Described(Ulong(0x77), Described(Ulong(code), fields)))


def _check(state: DeliveryState | None) -> None:
    outcome = state.outcome if isinstance(state, TransactionalState) else state
    if not isinstance(outcome, Accepted):
        raise Refused(str(getattr(outcome, "condition", outcome)))


def _transfer(
    session: ClientSession,
    link: OutgoingLink,
    tag: bytes,
    payload: bytes,
    state: DeliveryState | None,
) -> int:
    """Send one delivery of one frame with a state, which no client in the product does."""
    delivery_id = session._next_delivery_id
    session._next_delivery_id = (delivery_id + 1) % SERIAL
    session._next_outgoing_id = (session._next_outgoing_id + 1) % SERIAL
    session._remote_window -= 1
    session.unsettled[delivery_id] = (link, tag)
    link.sent += 1
    link.delivery_count += 1
    fields = [
        p.uint(link.handle),
        p.uint(delivery_id),
        encode_value(tag),
        p.uint(0),
        b"\x42",
        b"\x42",
        p.NULL,
        p.encode_state(state),
    ]
    session.write(p.described_list(p.TRANSFER, fields) + payload)
    return delivery_id
