"""The AMQP connections of all ports: bytes to connections and back.

`port_multiplexer` accepts connections and hands them over with the bytes already read. Reads come
in steps, so that other clients and commits run in between. Writes are gathered and flushed once per
iteration of the event loop. A client that does not read is bounded: its demand is withheld while
the transport is full, and it is disconnected above a hard bound.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Final, cast

from postbus.amqp import conditions
from postbus.amqp.connection import Connection
from postbus.amqp.limits import Limits
from postbus.broker.access.authz import Authorizer
from postbus.broker.router import Router
from postbus.contract.control import ConnectionDescription
from postbus.contract.entities import NamespaceLimits
from postbus.edge.access.admission import Admission
from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.access.loop_time import SMALL_BYTES, UNAUTHENTICATED, LoopTime
from postbus.edge.amqp.connected import described
from postbus.edge.amqp.connection import VIA_PROPERTY, AmqpConnection
from postbus.edge.amqp.demand_window import DemandLimits
from postbus.edge.amqp.endings import Endings
from postbus.edge.amqp.session_links import TIMEOUT_PROPERTY
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.refusals import ErrorMapper

logger = logging.getLogger(__name__)

READ_BYTES: Final = 64 << 10
"""Bytes read from one client at a time. Of a burst that fills it, the commit begins while the next
step is parsed. Measured, both ways at once, 1 KiB: 18 % more messages with a window of 100, 30 %
with 1,000; half the size costs more in calls than it gains."""

SHORT_READ_BYTES: Final = 8 << 10
"""The same for a client whose account is costly (`access/loop_time.py`)."""

HIGH_WATER_BYTES: Final = 1 << 20
BUFFER_SPARE_BYTES: Final = 16 << 20
"""Bytes that may wait for one client beside two messages of the largest size. Above that it is
disconnected; demand is withheld long before."""

LINKS_OF_PAGE: Final = 4_096
"""Links described at a time: 20 ms. A connection is described whole."""

LINKLESS_MS: Final = 300_000
"""A connection without links is closed after this time (Service Bus's five minutes)."""

LINK_PROPERTIES: Final = frozenset({VIA_PROPERTY, TIMEOUT_PROPERTY})
"""Properties of an attach that are used."""

UNAUTHENTICATED_MS: Final = 20_000
"""An unauthenticated connection is closed after this time, as Service Bus does."""

UNAUTHENTICATED_BYTES: Final = 96 << 10
"""Bytes that an unauthenticated client may send: they may be kept twice, as a name and in an answer
that the client does not read. Our choice: eight large tokens."""

UNAUTHENTICATED_SESSIONS: Final = 10
UNAUTHENTICATED_LINKS: Final = 20
"""Sessions and links of an unauthenticated client: each takes much more memory than its bytes."""

CLOSING_MS: Final = 30_000
"""Time that the last frames may wait for a client that does not read them."""

LINGER_S: Final = 1.0
"""Time for a client to disconnect after our close; cutting the transport at once could lose the
last frames."""


class AmqpListener:
    """All AMQP clients of this broker. `stop` lets them finish work in flight."""

    def __init__(
        self,
        router: Router,
        rules: SubscriptionRules,
        authorizer: Authorizer,
        limits: NamespaceLimits,
        tasks: asyncio.TaskGroup,
        namespace: str = "postbus",
        real_time_s: Callable[[], float] = time.time,
        throttle: AuthThrottle | None = None,
    ) -> None:
        self._router = router
        self._rules = rules
        self._authorizer = authorizer
        self._tasks = tasks
        self._namespace = namespace
        self.inflight = InflightBudget.within(limits.max_message_bytes)
        """Budget shared by all endpoints of this broker."""
        self._real_time_s = real_time_s
        self._throttle = throttle or AuthThrottle()
        self._has_changed = asyncio.Event()
        self.demand_limits = DemandLimits()
        self.follow_limits(limits)
        self._connections: set[AmqpTransport] = set()
        self._ids = itertools.count(1)
        # One buffer for all clients: it is emptied before the next read. A view, since asyncio's
        # TLS slices it.
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._short_buffer = self.read_buffer[:SHORT_READ_BYTES]
        self.loop_time = LoopTime()
        self._endings = Endings()
        self._ticking = tasks.create_task(self._tick_forever(), name="amqp-ticks")
        self.accepted_count = 0

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def follow_limits(self, limits: NamespaceLimits) -> None:
        """Apply the limits of a tier to new connections."""
        self._limits = limits
        self._engine_limits = Limits(max_message_bytes=limits.max_message_bytes)
        self.max_buffered_bytes = 2 * limits.max_message_bytes + BUFFER_SPARE_BYTES
        self.inflight.resize(limits.max_message_bytes)

    async def stop(self, grace_s: float) -> None:
        """Answer received messages, detach the clients, wait until they have disconnected.

        `grace_s` bounds the total; remaining clients are then cut off.
        """
        deadline_s = asyncio.get_running_loop().time() + grace_s
        self._ticking.cancel()
        for connection in self._connections:
            connection.stop_reading()
        await self._wait_for(
            lambda: not any(each.is_owing for each in self._connections), deadline_s
        )
        for connection in list(self._connections):
            connection.shut_down()
        await self._wait_for(lambda: not self._connections, deadline_s)
        self.abort()

    async def _wait_for(self, is_reached: Callable[[], bool], deadline_s: float) -> None:
        """Return when a condition holds, or the time is over."""
        while not is_reached():
            self._has_changed.clear()
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._has_changed.wait()
            except TimeoutError:
                return

    def abort(self) -> None:
        """Cut all connections."""
        for connection in list(self._connections):
            connection.abort()

    def welcome(self, transport: asyncio.Transport, first: bytes, admission: Admission) -> None:
        """Take over a connection that began with `first`."""
        protocol = AmqpTransport(self, admission)
        admission.hold(protocol, transport.abort)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if first:
            protocol.receive(first, is_burst=False)

    def described(self, skip: int, top: int) -> tuple[list[ConnectionDescription], int]:
        """Return connected clients, the longest connected first, and their total number.

        Fewer than `top` are returned when they have many links.
        """
        now_ms = time.monotonic_ns() // 1_000_000
        found = [each.connection for each in self._connections if each.connection is not None]
        found.sort(key=lambda one: one.connection_id)
        some: list[ConnectionDescription] = []
        link_count = 0
        for each in found[skip : skip + top]:
            some.append(described(each, now_ms))
            link_count += each.link_count
            if link_count >= LINKS_OF_PAGE:
                break
        return some, len(found)

    # --- for transports -------------------------------------------------------------------------

    def add(
        self, transport: AmqpTransport, address: str | None, admission: Admission
    ) -> AmqpConnection:
        """Count a new client from an IP address and return its connection."""
        self._connections.add(transport)
        self.accepted_count += 1
        return AmqpConnection(
            Connection(
                container_id="postbus",
                limits=self._engine_limits,
                link_properties=LINK_PROPERTIES,
            ),
            self._router,
            self._rules,
            self._authorizer,
            self._limits,
            ErrorMapper(self._namespace, admission.is_refusal_logged),
            self.inflight,
            self._endings,
            self._throttle,
            self.demand_limits,
            address=address,
            admission=admission,
            connection_id=next(self._ids),
            real_time_s=self._real_time_s,
            flush_soon=transport.flush_soon,
            cut=transport.abort,
        )

    def remove(self, transport: AmqpTransport) -> None:
        self._connections.discard(transport)
        self._has_changed.set()

    def buffer_for(self, admission: Admission) -> memoryview:
        """Return the buffer for a client's next bytes; a small one where reads should be short."""
        if self.loop_time.costly and self.loop_time.is_costly(_account_of(admission)):
            return self._short_buffer
        return self.read_buffer

    def note_written(self) -> None:
        """Note an answer; tasks that wait for it check their condition."""
        self._has_changed.set()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now_ms = time.monotonic_ns() // 1_000_000
            for connection in list(self._connections):
                connection.tick(now_ms)


class AmqpTransport(asyncio.BufferedProtocol):
    """One socket: the boundary between a client's bytes and the event loop."""

    def __init__(self, listener: AmqpListener, admission: Admission) -> None:
        self._listener = listener
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._connection: AmqpConnection | None = None
        self._is_flush_due = False
        self._is_lingering = False
        self._held = b""
        """Bytes that wait for the account's turn."""
        self._is_reading_stopped = False
        self._since_ms = time.monotonic_ns() // 1_000_000
        self._linkless_ms = 0
        self._unauthenticated_bytes = 0
        self._closing_ms = 0
        self._next_tick_ms = 0

    @property
    def connection(self) -> AmqpConnection | None:
        """Protocol state of the client, None after its end."""
        return self._connection

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._connection = self._listener.add(self, peer[0] if peer else None, self._admission)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._listener.buffer_for(self._admission)

    def buffer_updated(self, size_bytes: int) -> None:
        data = bytes(self._listener.read_buffer[:size_bytes])
        self.receive(data, is_burst=size_bytes == READ_BYTES)

    def receive(self, data: bytes, *, is_burst: bool) -> None:
        """Take bytes, in the turn of their account; of a burst more follow at once."""
        loop_time, account = self._listener.loop_time, self._admission.account
        if not loop_time.costly and len(data) <= SMALL_BYTES and account:  # most reads of receivers
            assert self._connection is not None
            if account != loop_time.last:
                loop_time.saw(account)
            self._connection.receive(data, time.monotonic_ns() // 1_000_000)
        elif self._held or not loop_time.admit(
            _account_of(self._admission), len(data), self._take_turn
        ):
            self._held += data
            if self._transport is not None:
                self._transport.pause_reading()
        else:
            self._take(data, is_burst=is_burst)

    def _take_turn(self) -> None:
        """Process the bytes that waited for their turn, and read on."""
        data, self._held = self._held, b""
        if self._connection is not None:
            self._take(data, is_burst=False)
            self._read_on()

    def _take(self, data: bytes, *, is_burst: bool) -> None:
        assert self._connection is not None
        account = _account_of(self._admission)
        loop_time = self._listener.loop_time
        began_ns, work_ns = time.monotonic_ns(), loop_time.work_ns()
        self._connection.receive(data, began_ns // 1_000_000)
        loop_time.note(account, began_ns, loop_time.work_ns() - work_ns)
        if not self._admission.is_authenticated:
            self._bound_unauthenticated(self._connection, len(data))
        if is_burst and not self._is_reading_stopped:
            self._rest()

    def _bound_unauthenticated(self, connection: AmqpConnection, size_bytes: int) -> None:
        self._unauthenticated_bytes += size_bytes
        is_too_much = (
            self._unauthenticated_bytes > UNAUTHENTICATED_BYTES
            or connection.engine.session_count > UNAUTHENTICATED_SESSIONS
            or connection.engine.link_count > UNAUTHENTICATED_LINKS
        )
        if is_too_much and not connection.is_ended:
            text = (
                f"A client without a key may send {UNAUTHENTICATED_BYTES} bytes and have"
                f" {UNAUTHENTICATED_SESSIONS} sessions and {UNAUTHENTICATED_LINKS} links:"
                " authenticate first."
            )
            connection.close(conditions.UNAUTHORIZED_ACCESS, text)

    def _rest(self) -> None:
        """Read on after two loop iterations: the first starts a commit, the second sends it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._loop.call_soon, self._read_on)

    def _read_on(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self._is_reading_stopped:
            transport.resume_reading()

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.set_paused(True)

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.set_paused(False)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        self._held = b""
        self._listener.remove(self)
        self._admission.release(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lost()

    # --- called by the listener -----------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Once a second: heartbeats, idle and unfinished connections."""
        connection = self._connection
        if connection is None or now_ms < self._next_tick_ms:
            return
        engine = connection.engine
        longest_ms = 15_000 if connection.is_authorised else 1_000
        self._next_tick_ms = now_ms + min(engine.tick_interval_ms, longest_ms)
        connection.tick(now_ms)
        if engine.is_closed or (self._transport is not None and self._transport.is_closing()):
            self._closing_ms = self._closing_ms or now_ms
            if now_ms - self._closing_ms >= CLOSING_MS:
                self.abort()
            return
        if not connection.is_authorised and now_ms - self._since_ms >= UNAUTHENTICATED_MS:
            self._close_inactive(connection, UNAUTHENTICATED_MS)
        elif connection.link_count:
            self._linkless_ms = 0
        elif not self._linkless_ms:
            self._linkless_ms = now_ms
        elif now_ms - self._linkless_ms >= LINKLESS_MS:
            self._close_inactive(connection, LINKLESS_MS)

    def _close_inactive(self, connection: AmqpConnection, allowed_ms: int) -> None:
        text = (
            f"The connection was inactive for more than the allowed {allowed_ms} milliseconds and"
            " is closed by container 'LinkTracker'."
        )
        connection.close(conditions.CONNECTION_FORCED, text)

    @property
    def is_owing(self) -> bool:
        """True if the client waits for answers."""
        return self._connection is not None and self._connection.unanswered_count > 0

    def stop_reading(self) -> None:
        """Stop reading from the client, which may read on."""
        self._is_reading_stopped = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def shut_down(self) -> None:
        """Close the protocol; the client disconnects."""
        self._is_reading_stopped = False
        if self._connection is not None:
            self._connection.shut_down()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- writing --------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Write what the engine has at the end of this iteration of the event loop."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        transport, connection = self._transport, self._connection
        if transport is None or connection is None or transport.is_closing():
            return
        connection.run_pumps()
        buffers = connection.engine.data_to_send()
        if buffers:
            transport.write(b"".join(buffers))
            self._listener.note_written()
            if transport.get_write_buffer_size() > self._listener.max_buffered_bytes:
                logger.warning("client does not read", extra={"conn": connection.connection_id})
                transport.abort()
                return
        if connection.engine.is_closed and not self._is_lingering:
            self._is_lingering = True
            if connection.has_peer_closed:
                transport.close()
            else:
                self._loop.call_later(LINGER_S, transport.close)


def _account_of(admission: Admission) -> str:
    """Return the account for turns: that of the client's key, or its address before it has one."""
    return admission.account or f"{UNAUTHENTICATED}{admission.source}"
