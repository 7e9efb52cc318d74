"""One client connection: dispatches engine events to endpoints, keeps grants, detaches links.

The transport calls in with bytes and takes bytes out; nothing here awaits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Final, TypeAlias, assert_never

from postbus.amqp import conditions
from postbus.amqp.conditions import AmqpConnectionError, AmqpError
from postbus.amqp.connection import Connection
from postbus.amqp.events import (
    ConnectionClosed,
    ConnectionOpened,
    DeliveriesAnswered,
    DeliveriesUpdated,
    Event,
    LinkAttached,
    LinkDetached,
    LinkDrained,
    LinkFlowed,
    OversizeReceived,
    SaslInitReceived,
    SessionBegun,
    SessionEnded,
    TransferReceived,
    TransfersReceived,
    UnknownDeliveries,
)
from postbus.amqp.link import IncomingLink, Link, OutgoingLink
from postbus.amqp.performatives import Rejected
from postbus.amqp.session import Session
from postbus.broker.access.authz import Authorizer, Grant, TokenRefused
from postbus.broker.address import Address
from postbus.broker.audit import AuditedChange
from postbus.broker.router import Router
from postbus.contract.entities import NamespaceLimits, Right
from postbus.edge.access.admission import Admission
from postbus.edge.access.attaching import attach_refusal, target_refusal
from postbus.edge.access.auth_throttle import AuthThrottle, TooManyChecks
from postbus.edge.access.inflight_budget import InflightBudget
from postbus.edge.amqp.addresses import Node, NodeAddress, parse_address
from postbus.edge.amqp.cbs import TokenNode
from postbus.edge.amqp.demand_window import DemandLimits
from postbus.edge.amqp.endings import Endings
from postbus.edge.amqp.grants import Grants
from postbus.edge.amqp.held_sessions import HeldSessions
from postbus.edge.amqp.idleness import detach_idle
from postbus.edge.amqp.late_calls import LateCalls
from postbus.edge.amqp.link_context import Pumped
from postbus.edge.amqp.link_memory import LinkMemory
from postbus.edge.amqp.management_node import ManagementNode
from postbus.edge.amqp.receiver_links import ReceiverEndpoint
from postbus.edge.amqp.requests import REQUEST_BYTES, Handle, RequestEndpoint, ResponseEndpoint
from postbus.edge.amqp.sender_links import SenderEndpoint
from postbus.edge.amqp.session_completions import SessionCompletions
from postbus.edge.amqp.session_links import SessionEndpoint, SessionFilter, source_refusal
from postbus.edge.amqp.settlements import LOST
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.amqp.transactions import CoordinatorEndpoint, Transactions
from postbus.edge.amqp.unfinished import Unfinished
from postbus.edge.refusals import ErrorMapper
from postbus.entity.commands import Refusal, Refused, SubQueue

logger = logging.getLogger(__name__)

VIA_PROPERTY: Final = "com.microsoft:transfer-destination-address"
"""Link property of a sender: messages are forwarded to this entity (send-via)."""

MAX_REFUSED_TOKENS: Final = 20
"""Refused tokens after which a connection is closed, so that guessing keys costs a reconnect."""

WRONG_KEY: Final = 1
TRANSIENT: Final = 4
"""SASL outcomes auth, and sys-temp: a later attempt may succeed. Source: AMQP 1.0 part 5, 5.3.3.6.
"""

ANONYMOUS_MECHANISMS: Final = frozenset({"ANONYMOUS", "MSSBCBS"})

Endpoint: TypeAlias = (
    SenderEndpoint | ReceiverEndpoint | RequestEndpoint | ResponseEndpoint | CoordinatorEndpoint
)


class AmqpConnection:
    """The broker's side of one client connection."""

    def __init__(
        self,
        engine: Connection,
        router: Router,
        subscription_rules: SubscriptionRules,
        authorizer: Authorizer,
        limits: NamespaceLimits,
        error_mapper: ErrorMapper,
        inflight: InflightBudget,
        endings: Endings,
        throttle: AuthThrottle,
        demand_limits: DemandLimits,
        *,
        address: str | None,
        admission: Admission,
        connection_id: int,
        real_time_s: Callable[[], float],
        flush_soon: Callable[[], None],
        cut: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.router = router
        self.subscription_rules = subscription_rules
        self.authorizer = authorizer
        self.limits = limits
        self.demand_limits = demand_limits
        self.error_mapper = error_mapper
        self.inflight = inflight
        self.connection_id = connection_id
        self.real_time_s = real_time_s
        self.flush_soon = flush_soon
        loop = asyncio.get_running_loop()
        self.call_later = loop.call_later
        self.loop_time_s = loop.time
        self.is_paused = False
        self.is_ended = False
        self._is_lost = False
        self.has_peer_closed = False
        self.unanswered_count = 0
        """Commands in flight that the client waits for."""
        self._throttle = throttle
        self.address = address
        self.admission = admission
        self._cut = cut
        self.large_answers = 0  # requests in flight with possibly large answers
        self.held_answer_bytes = 0  # of answers that wait for credit
        self._pumps: dict[Pumped, None] = {}
        self._starved: dict[Pumped, None] = {}
        self._grants = Grants(authorizer, real_time_s, self.call_later, self.review_grants)
        self._refused_tokens = 0
        self._late = LateCalls()
        self._endpoints: dict[Link, Endpoint] = {}
        self.sessions = HeldSessions()
        self.transactions = Transactions(error_mapper)
        self.completions = SessionCompletions()
        self._unfinished = Unfinished()
        self._links = LinkMemory(inflight.links)
        self._endings = endings
        authorizer.add_holder(self)

    # --- from the transport ---------------------------------------------------------------------

    def receive(self, data: bytes, now_ms: int) -> None:
        """Take bytes; consecutive transfers of one link go to its endpoint together."""
        try:
            self._handle(self.engine.receive_data(data, now_ms))
            if self.engine.partial_bytes != self._unfinished.counted_bytes:
                self._unfinished.count(self)
            self.feed_starved()
        except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
            self.broke()
        self.flush_soon()

    def tick(self, now_ms: int) -> None:
        """Heartbeats, idle peers and links, expired grants."""
        try:
            self._handle(self.engine.tick(now_ms))
            if self._grants.has_expired():
                self.review_grants()
            detach_idle(self, self._endpoints, now_ms)
            self._unfinished.detach_late(self, now_ms)
        except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
            self.broke()
        self.flush_soon()

    def run_pumps(self) -> None:
        """Bring demand in line with credit; called once before each write."""
        if self._pumps:
            pumps, self._pumps = self._pumps, {}
            try:
                for endpoint in pumps:
                    endpoint.pump()
            except Exception:  # noqa: BLE001 - a supervised boundary: the smallest scope ends
                self.broke()

    def set_paused(self, is_paused: bool) -> None:
        """Record whether the transport is full."""
        self.is_paused = is_paused
        if not is_paused:
            self.feed_starved()

    def shut_down(self) -> None:
        """Detach all links and close, with the condition that makes clients reconnect."""
        text = "The broker is shutting down; reconnect."
        for link in list(self._endpoints):
            error = self.error_mapper.error(
                conditions.DETACH_FORCED, text, self._endpoints[link].path
            )
            self.detach(link, error)
        self.close(conditions.CONNECTION_FORCED, text)

    def close(self, condition: str, text: str) -> None:
        """Close from our side with an error."""
        self.engine.close(self.error_mapper.error(condition, text, ""))
        self._end()
        self.flush_soon()

    def lost(self) -> None:
        """Release all resources; the transport is gone."""
        self._is_lost = True
        self._end()

    def broke(self) -> None:
        """End the connection because of an error of ours; called in an `except` block."""
        logger.exception(
            "connection closed by an internal error", extra={"conn": self.connection_id}
        )
        self._cut()

    @property
    def link_count(self) -> int:
        return len(self._endpoints)

    @property
    def is_authorised(self) -> bool:
        """Return whether the client has presented a key that is still valid."""
        return len(self._grants) > 0

    # --- for endpoints --------------------------------------------------------------------------

    @property
    def account(self) -> str:
        """Account charged for this connection; the same from its first key on."""
        return self.admission.account

    def endpoints(self) -> Mapping[Link, Endpoint]:
        """Return the endpoints of all links."""
        return self._endpoints

    def rules(self) -> list[str]:
        """Return the names of the authorization rules of the client's keys."""
        return sorted(set(self._grants.rules()))

    def detach(self, link: Link, error: AmqpError | None) -> None:
        """Detach a link from our side and forget its endpoint."""
        if not self.is_ended:
            link.detach(error)
        self._close_endpoint(link)
        self.flush_soon()

    def add_grant(self, grant: Grant) -> None:
        """Keep the grant of a token; a later token of an audience replaces the former."""
        if self.is_ended:
            return
        self._grants.add(grant)
        if self.admission.is_authenticated:
            return
        if not self.admission.mark_authenticated(grant):
            self.close(conditions.SERVER_BUSY, "Too many connections are open with this key.")
            return
        self._links.move(self.account)
        if self._unfinished.counted_bytes:
            self._unfinished.count(self)  # for another account from now on

    def count_refused_token(self) -> None:
        """Count a refused token; close the connection after too many."""
        self._refused_tokens += 1
        if self._refused_tokens >= MAX_REFUSED_TOKENS:
            self.close(
                conditions.UNAUTHORIZED_ACCESS, "Too many tokens on this connection were refused."
            )

    def check_key(self, check: Callable[[], None], *, is_known: bool = False) -> None:
        """Call `check` now, or in its turn while keys are guessed at the client's address.

        `is_known`: the client has presented this key before. Raises `TooManyChecks`.
        """
        if is_known:
            check()
        else:
            self._late.admit(self, self._throttle, check)

    def refuse_slowly(self, why: str, answer: Callable[[], None]) -> None:
        """Answer a wrong key after a delay that grows with the refusals of the client's address."""
        self._throttle.refuse(self.address, "amqp", why, self._late.add(self, answer))

    def is_allowed(self, path: str, right: Right) -> bool:
        """Return whether a valid grant of this connection covers a right on a path."""
        return self._grants.find(path, right) is not None

    def audited_change(self, verb: str, path: str, right: Right) -> AuditedChange:
        """Describe an action under a right on a path for the audit."""
        grant = self._grants.find(path, right)
        caller = "nobody" if grant is None else grant.caller
        return AuditedChange(caller, self.address or "", "AMQP", verb, path, {})

    def pump_soon(self, endpoint: Pumped) -> None:
        """Pump an endpoint before the next write."""
        self._pumps[endpoint] = None
        self.flush_soon()

    def note_starved(self, endpoint: Pumped) -> None:
        """Pump an endpoint when the client has read or settled something."""
        self._starved[endpoint] = None

    def must_wait(self, endpoint: Pumped, session: Session, max_out_bytes: int) -> bool:
        """Return whether the client must read first; if so, the endpoint is pumped afterwards."""
        if self.is_paused or session.held_count > 0:
            self.note_starved(endpoint)
        elif self.engine.out_bytes > max_out_bytes:
            self.pump_soon(endpoint)  # in the next round, when this one's bytes are written
        else:
            return False
        return True

    def response_endpoint(
        self, session: Session, node: str, reply_to: str | None
    ) -> ResponseEndpoint | None:
        """Return the link that takes the responses of a node in a session."""
        endpoints = [
            endpoint
            for endpoint in self._endpoints.values()
            if isinstance(endpoint, ResponseEndpoint) and endpoint.answers(session, node)
        ]
        for endpoint in endpoints:
            if endpoint.is_addressed(reply_to):
                return endpoint
        return endpoints[0] if endpoints else None

    # --- events ---------------------------------------------------------------------------------

    def _handle(self, events: list[Event]) -> None:
        burst: list[TransferReceived] = []
        sending: IncomingLink | None = None  # the link of the burst
        for event in events:
            if type(event) is TransferReceived and event.link is sending:
                burst.append(event)
                continue
            if burst:
                self._receive(burst)
                burst, sending = [], None
            match event:
                case TransferReceived():
                    burst, sending = [event], event.link
                case TransfersReceived(link):
                    endpoint = self._endpoints.get(link)
                    if isinstance(endpoint, SenderEndpoint):
                        endpoint.receive_run(event)
                    elif isinstance(endpoint, RequestEndpoint | CoordinatorEndpoint):
                        endpoint.receive(event.each())
                case OversizeReceived():
                    endpoint = self._endpoints.get(event.link)
                    if isinstance(endpoint, SenderEndpoint | RequestEndpoint | CoordinatorEndpoint):
                        endpoint.refuse_oversize(event)
                case DeliveriesUpdated():
                    endpoint = self._endpoints.get(event.link)
                    if isinstance(endpoint, ReceiverEndpoint):
                        endpoint.updated(event)
                case LinkFlowed(link):
                    endpoint = self._endpoints.get(link)
                    if isinstance(endpoint, ReceiverEndpoint | ResponseEndpoint):
                        endpoint.flowed()
                case LinkAttached(link):
                    self._attach(link)
                case LinkDetached(link):
                    self._close_endpoint(link)
                case SessionEnded(session):
                    for link in [each for each in self._endpoints if each.session is session]:
                        self._close_endpoint(link)
                case SaslInitReceived():
                    self._authenticate(event)
                case UnknownDeliveries(session, first, last):
                    error = self.error_mapper.refused(LOST, "")
                    state = Rejected(error.condition, error.description)
                    session.settle_unknown(first, last, state)
                case ConnectionOpened(container_id):
                    logger.debug(
                        "connection opened",
                        extra={"conn": self.connection_id, "container": container_id},
                    )
                case ConnectionClosed(error):
                    self.has_peer_closed = not isinstance(error, AmqpConnectionError)
                    self._end()
                    if error is not None:
                        self._log_error(error)
                case SessionBegun() | DeliveriesAnswered() | LinkDrained():  # the last two: clients
                    pass
                case _:
                    assert_never(event)
        if burst:
            self._receive(burst)
        self.completions.submit()

    def _receive(self, burst: list[TransferReceived]) -> None:
        endpoint = self._endpoints.get(burst[0].link)
        if isinstance(endpoint, SenderEndpoint | RequestEndpoint | CoordinatorEndpoint):
            endpoint.receive(burst)

    def _authenticate(self, event: SaslInitReceived) -> None:
        if event.mechanism in ANONYMOUS_MECHANISMS:
            self._accept_sasl()
        elif event.mechanism == "PLAIN":
            try:
                self.check_key(partial(self._check_password, event.initial_response))
            except TooManyChecks:
                self._refuse_sasl(TRANSIENT)
        else:
            self._refuse_sasl()

    def _check_password(self, response: bytes) -> None:
        try:
            _, rule_name, key = response.decode().split("\0")
            grants = self.authorizer.check_password(rule_name, key)
        except TokenRefused as error:
            self.refuse_slowly(str(error), self._refuse_sasl)
            return
        except ValueError:
            self.refuse_slowly("SASL PLAIN has no rule name and key", self._refuse_sasl)
            return
        for grant in grants:
            self.add_grant(grant)
        if self.is_ended:
            self._refuse_sasl(TRANSIENT)
        else:
            self._accept_sasl()

    def _accept_sasl(self) -> None:
        """Let the client in; it may have sent its open right behind the SASL init."""
        self.engine.accept_sasl()
        self.receive(b"", self.engine.last_received_ms)

    def _refuse_sasl(self, code: int = WRONG_KEY) -> None:
        self.engine.refuse_sasl(code)
        self.flush_soon()

    # --- attaching ------------------------------------------------------------------------------

    def _attach(self, link: Link) -> None:
        terminus = link.target if link.is_incoming else link.source
        if terminus is not None and terminus.is_coordinator and isinstance(link, IncomingLink):
            if self._has_room_for(link):
                coordinator = CoordinatorEndpoint(self, link)
                self._endpoints[link] = coordinator
                coordinator.attach()
            return
        if terminus is not None and (terminus.is_coordinator or terminus.is_dynamic):
            text = "Dynamic nodes are not supported."
            link.refuse(self.error_mapper.error(conditions.NOT_IMPLEMENTED, text, ""))
            return
        if terminus is None or not terminus.address:
            text = "The link has no address."
            link.refuse(self.error_mapper.error(conditions.INVALID_FIELD, text, ""))
            return
        node = parse_address(terminus.address)
        if node.node is Node.CBS:
            self._attach_node(link, "$cbs", TokenNode(self).handle, REQUEST_BYTES)
            return
        right = Right.SEND if link.is_incoming else Right.LISTEN
        wanted = tuple(Right) if node.node is Node.MANAGEMENT else (right,)
        if not any(self.is_allowed(node.path, each) for each in wanted):
            error = self.error_mapper.missing_right(right, node.path)
            link.refuse(error)
            return
        via = link.properties.get(VIA_PROPERTY)
        if link.is_incoming and isinstance(via, str):
            self._attach_via(link, node, parse_address(via))
            return
        self.router.resolve(node.path, partial(self._resolved, link, node))

    def _has_room_for(self, link: Link) -> bool:
        """Count a link before its endpoint is made; refuse it where its key has too many."""
        if self._links.take(link):
            return True
        text = "Too many links are attached with this key."
        link.refuse(self.error_mapper.error(conditions.RESOURCE_LIMIT_EXCEEDED, text, ""))
        return False

    def _attach_via(self, link: Link, node: NodeAddress, destination: NodeAddress) -> None:
        """Attach a sender that forwards to another entity; both need the right to send."""
        if not self.is_allowed(destination.path, Right.SEND):
            link.refuse(self.error_mapper.missing_right(Right.SEND, destination.path))
            return

        def resolved(address: Address | None) -> None:
            if link.is_gone or self.is_ended:
                return
            absent = Refused(Refusal.ENTITY_NOT_FOUND)
            refused = absent if address is None else target_refusal(address)
            if refused is not None or address is None:
                link.refuse(self.error_mapper.refused(refused or absent, destination.path))
                return
            resolve = partial(self._resolved, link, node, via=address.name)
            self.router.resolve(node.path, resolve)

        self.router.resolve(destination.path, resolved)

    def _attach_node(self, link: Link, node: str, handle: Handle, max_bytes: int) -> None:
        if not self._has_room_for(link):
            return
        if isinstance(link, IncomingLink):
            request = RequestEndpoint(self, link, node, handle, max_bytes)
            self._endpoints[link] = request
            request.attach()
        elif isinstance(link, OutgoingLink):
            response = ResponseEndpoint(self, link, node)
            self._endpoints[link] = response
            response.attach()

    def _resolved(
        self, link: Link, node: NodeAddress, address: Address | None, via: str | None = None
    ) -> None:
        if link.is_gone or self.is_ended:
            return
        refused = None
        if address is None:
            refused = Refused(Refusal.ENTITY_NOT_FOUND)
        elif node.node is Node.ENTITY:
            refused = attach_refusal(address, is_sender=link.is_incoming)
        if refused is not None or address is None:
            link.refuse(self.error_mapper.refused(refused or Refused(Refusal.BUSY), node.path))
        elif node.node is Node.MANAGEMENT:
            handle = ManagementNode(self, node.path).handle
            max_bytes = self.limits.max_message_bytes + REQUEST_BYTES
            self._attach_node(link, node.path.lower(), handle, max_bytes)
        elif isinstance(link, IncomingLink) and self._has_room_for(link):
            sender = SenderEndpoint(self, link, address, node.path, via)
            self._endpoints[link] = sender
            size = address.max_message_bytes(self.limits)
            sender.attach(size, min(size, self.limits.max_batch_bytes))
        elif isinstance(link, OutgoingLink):
            self._attach_receiver(link, address, node)
        self.flush_soon()

    def _attach_receiver(self, link: OutgoingLink, address: Address, node: NodeAddress) -> None:
        """Attach, unless the source asks for something unsupported: no request is ignored."""
        wanted = SessionFilter.of(link.source)
        needs_session = address.requires_session and address.sub_queue is SubQueue.ACTIVE
        if wanted is not None and not needs_session:
            refused = Refused(Refusal.SESSION_NOT_SUPPORTED)
            link.refuse(self.error_mapper.refused(refused, node.path))
            return
        refusal = source_refusal(link.source, needs_session=needs_session)
        if refusal is not None:
            link.refuse(self.error_mapper.error(*refusal, node.path))
            return
        if not self._has_room_for(link):
            return
        if wanted is None:
            receiver = ReceiverEndpoint(self, link, address, node.path)
        else:
            receiver = SessionEndpoint(self, link, address, node.path, wanted)
        self._endpoints[link] = receiver
        receiver.attach()

    def _log_error(self, error: AmqpError) -> None:
        if self.admission.is_refusal_logged():
            reported = {"condition": error.condition, "why": error.description}
            extra = {"conn": self.connection_id, **reported}
            logger.info("connection closed with an error", extra=extra)

    # --- ending ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Stop writing, except for what the engine already holds."""
        self.is_ended = True
        self.authorizer.remove_holder(self)
        self._grants.close()
        self._late.end()
        for link in self._endpoints:
            link.is_attached = False
        self.transactions.roll_back()
        self._unfinished.end(self)
        self._pumps.clear()
        self._endings.add(self)

    def take_down(self, most: int) -> int:
        """Close up to a number of endpoints; return how many were closed."""
        links = list(islice(self._endpoints, most))
        for link in links:
            self._close_endpoint(link)
        if not self._endpoints:
            self._links.end()
        if self._is_lost and not self._endpoints:
            self.engine.discard()  # endpoints looked there for unwritten frames
        return len(links)

    def _close_endpoint(self, link: Link) -> None:
        link.is_attached = False
        self._links.give_back(link)
        endpoint = self._endpoints.pop(link, None)
        if endpoint is not None:
            if isinstance(endpoint, ReceiverEndpoint | RequestEndpoint):
                self._pumps.pop(endpoint, None)
                self._starved.pop(endpoint, None)
            endpoint.close()

    def feed_starved(self) -> None:
        """Pump the waiting endpoints: something was read, settled or answered."""
        if self._starved:
            self._pumps.update(self._starved)
            self._starved.clear()
            self.flush_soon()

    def review_grants(self) -> None:
        """Detach links without a right: a token expired or a rule changed (ADR 31)."""
        try:
            self._review_grants()
            self.flush_soon()
        except Exception:  # noqa: BLE001 - a supervised boundary: the others are to be reviewed too
            self.broke()

    def _review_grants(self) -> None:
        self._grants.renew()
        self.transactions.review_rights()
        for link, endpoint in list(self._endpoints.items()):
            if isinstance(endpoint, SenderEndpoint | ReceiverEndpoint):
                right, paths = Right.LISTEN, [endpoint.path]
                if isinstance(endpoint, SenderEndpoint):
                    right = Right.SEND
                    paths += [] if endpoint.via is None else [endpoint.via]
                lost = [each for each in paths if not self.is_allowed(each, right)]
                if lost:
                    self.detach(link, self.error_mapper.missing_right(right, lost[0]))
