"""Execution of commands on entities that are spread over all partitions.

The edge submits the same commands as for any other entity; here they are sent to their partition
(by key, lock token, sequence number or session), or to several, and the replies are merged. Nothing
is stored here. Messages without key go to healthy partitions in turn, and to another one if the
first certainly did not store them (ADR 2).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, assert_never

from postbus.broker.partition.host import Host
from postbus.broker.partition.ownership import HostStatus
from postbus.broker.partition.sinks import DeliverySink
from postbus.broker.placement import (
    has_two_keys,
    key_of,
    partition_of_key,
    partition_of_number,
    partition_of_token,
    split,
)
from postbus.broker.spread.consumers import PartitionedConsumer, SessionSeeker
from postbus.broker.spread.replies import (
    AnywhereSend,
    MergedSend,
    MergedSettlement,
    Walk,
    away,
    submit_all,
)
from postbus.entity.commands import (
    AcceptSession,
    AddConsumer,
    Arrive,
    Cancelled,
    CancelScheduled,
    CheckLocks,
    CheckSends,
    Command,
    CompleteSessions,
    DeferredReceived,
    DeleteBySequence,
    DeleteMessages,
    Delivery,
    DemandSet,
    Disposition,
    Done,
    DropEntity,
    Enqueue,
    Enqueued,
    Freeze,
    GetSessionState,
    Hold,
    ListSessions,
    LocksRenewed,
    LoseLocks,
    NotePublication,
    OnReply,
    Peek,
    Peeked,
    PutEntity,
    Quiesce,
    ReceiveDeferred,
    ReceiveMode,
    Refusal,
    Refused,
    RemoveConsumer,
    RenewLocks,
    RenewSession,
    ResendBySequence,
    ReserveNumbers,
    SessionsListed,
    SetDemand,
    SetSessionState,
    Settle,
    Settled,
    Shipped,
    SupplyRows,
    Thaw,
    Tick,
    Transact,
)
from postbus.entity.group_commands import GroupCommand

BURST: Final = 64
"""Maximum number of messages without key that go to one partition together, for group commit (ADR
24)."""

REPEAT_S: Final = 0.1
REPEATS: Final = 20
"""Maximum number of repetitions of a settlement whose read failed; after that its lock expires."""

TWO_KEYS: Final = Refused(
    Refusal.NOT_ALLOWED, "InvalidOperation: the partition key differs from the session id."
)
DIFFERENT_KEYS: Final = Refused(
    Refusal.NOT_ALLOWED, "All messages of a batch need the same key in a partitioned entity."
)
NO_BATCH_DELETE: Final = Refused(
    Refusal.NOT_ALLOWED, "Messages of a partitioned entity cannot be deleted in a batch."
)
NOT_FOUND: Final = Refused(Refusal.MESSAGE_NOT_FOUND)
GONE: Final = Refused(Refusal.LOCK_LOST)


class PartitionedEntities:
    """Executes commands of partitioned entities, as a host does for all others."""

    def __init__(self, hosts: Sequence[Host], detects_duplicates: Callable[[int], bool]) -> None:
        """`hosts`: in order of partition id; `detects_duplicates`: of an entity by its number."""
        self._hosts = hosts
        self._detects_duplicates = detects_duplicates
        self._next = itertools.cycle(range(len(hosts)))
        self._sinks: dict[int, DeliverySink] = {}
        self._consumers: dict[int, PartitionedConsumer] = {}
        self._seekers: dict[int, SessionSeeker] = {}
        self._session_hosts: dict[int, Host] = {}

    def register_sink(self, consumer_id: int, sink: DeliverySink) -> None:
        self._sinks[consumer_id] = sink

    def unregister_sink(self, consumer_id: int) -> None:
        self._sinks.pop(consumer_id, None)
        seeker = self._seekers.pop(consumer_id, None)
        if seeker is not None:
            seeker.withdraw()
        consumer = self._consumers.get(consumer_id)
        if consumer is not None:
            consumer.close()
        host = self._session_hosts.get(consumer_id)
        if host is not None:
            host.unregister_sink(consumer_id)

    def submit(self, command: Command, on_reply: OnReply[Any] | None = None) -> None:
        """Apply a command in its partitions; `on_reply` is called once."""
        answer = _ignore if on_reply is None else on_reply
        match command:
            case Enqueue():
                self._enqueue(command, answer)
            case Settle() | CheckLocks():
                self._settle(command, answer)
            case ReserveNumbers():
                self._reserve(command, answer)
            case SetDemand():
                self._set_demand(command, answer)
            case AddConsumer():
                self._add_consumer(command, answer)
            case AcceptSession():
                self._accept_session(command, answer)
            case RemoveConsumer():
                self._remove_consumer(command, answer)
            case RenewLocks():
                self._renew(command, answer)
            case Peek():
                self._peek(command, answer)
            case ReceiveDeferred():
                self._receive_deferred(command, answer)
            case CancelScheduled():
                self._cancel(command, answer)
            case DeleteMessages():
                answer(NO_BATCH_DELETE)
            case RenewSession() | GetSessionState() | SetSessionState():
                self._host_of_key(command.session_id).submit(command, answer)
            case ListSessions():
                self._list_sessions(command, answer)
            case LoseLocks():
                loaded = [host for host in self._hosts if host.is_loaded]
                submit_all([(host, command) for host in loaded], lambda _: answer(Done()))
            case (
                Transact()
                | CompleteSessions()
                | DeleteBySequence()
                | ResendBySequence()
                | Arrive()
                | CheckSends()
                | NotePublication()
                | Shipped()
                | Freeze()
                | Hold()
                | Thaw()
                | PutEntity()
                | DropEntity()
                | SupplyRows()
                | Tick()
                | Quiesce()
            ):
                raise TypeError(f"{type(command).__name__} belongs to one partition")
            case _:
                if isinstance(command, GroupCommand):
                    raise TypeError(f"{type(command).__name__} belongs to one partition")
                assert_never(command)

    def submit_anywhere(
        self, command: Enqueue | Transact, on_reply: OnReply[Any] | None = None
    ) -> None:
        """Send to one healthy partition in turn, and to another one if it certainly did not apply
        it.
        """
        answer = _ignore if on_reply is None else on_reply
        AnywhereSend(self._in_turn(), command, answer).go_on()

    # --- sending --------------------------------------------------------------------------------

    def _enqueue(self, command: Enqueue, answer: OnReply[Enqueued]) -> None:
        messages = command.messages
        wrong = [n for n, each in enumerate(messages) if has_two_keys(each)]
        if wrong and (command.is_atomic or len(wrong) == len(messages)):
            answer(TWO_KEYS)
            return
        detects = self._detects_duplicates(command.entity_no)
        keys = [key_of(each, detects_duplicates=detects) for each in messages]
        if not keys:
            answer(Enqueued([]))
        elif wrong:
            self._enqueue_each(command, keys, wrong, answer)
        elif keys.count(keys[0]) == len(keys) and (
            keys[0] is not None or command.is_atomic or len(keys) <= BURST
        ):
            self._enqueue_together(command, keys[0], answer)
        elif command.is_atomic:
            answer(DIFFERENT_KEYS)
        else:
            self._enqueue_each(command, keys, wrong, answer)

    def _enqueue_together(
        self, command: Enqueue, key: bytes | None, answer: OnReply[Enqueued]
    ) -> None:
        if key is None:
            self.submit_anywhere(command, answer)
            return
        host = self._host_of_key(key)
        refused = away(host)
        if refused is not None:
            answer(refused)  # at once: other messages of the same burst wait for this reply
        else:
            host.submit(command, answer)

    def _reserve(self, command: ReserveNumbers, answer: OnReply[Enqueued]) -> None:
        """Reserve sequence numbers in the partition of the messages, which have one key."""
        detects = self._detects_duplicates(command.entity_no)
        key = key_of(command.messages[0], detects_duplicates=detects)
        assert key is not None, "a message without a key cannot be sent in a transaction"
        self._host_of_key(key).submit(command, answer)

    def _enqueue_each(
        self,
        command: Enqueue,
        keys: list[bytes | None],
        wrong: list[int],
        answer: OnReply[Enqueued],
    ) -> None:
        """Send each message to its partition; those without key go in bursts."""
        messages = command.messages
        count = len(self._hosts)
        keyless = [index for index, key in enumerate(keys) if key is None]
        keyed = [n for n, key in enumerate(keys) if key is not None and n not in wrong]
        places = split([partition_of_key(keys[index] or b"", count) for index in keyed])
        groups: list[tuple[bytes | None, list[int]]] = [
            (keys[keyed[part[0]]], [keyed[n] for n in part]) for part in places.values()
        ]
        groups += [(None, keyless[n : n + BURST]) for n in range(0, len(keyless), BURST)]
        merged = MergedSend(len(messages), len(groups) + bool(wrong), answer)
        if wrong:
            merged.take(wrong, TWO_KEYS)
        for key, indexes in groups:
            part = Enqueue(command.entity_no, [messages[index] for index in indexes])
            self._enqueue_together(part, key, merged.taking(indexes))

    def _in_turn(self) -> list[Host]:
        """Return the partitions from the next one on, available ones first.

        A partition that is being loaded is a last resort: it may take as long as its store.
        """
        start = next(self._next)
        hosts = [*self._hosts[start:], *self._hosts[:start]]
        if all(host.is_loaded and not host.is_full for host in hosts):
            return hosts
        return sorted(hosts, key=_reluctance)

    # --- settling -------------------------------------------------------------------------------

    def _settle(self, command: Settle | CheckLocks, answer: OnReply[Settled]) -> None:
        """Settle by lock token; the parts are independent, and the locks of a failed part count as
        lost.
        """
        tokens = command.lock_tokens
        places = split([partition_of_token(token) for token in tokens])
        if not places:
            answer(Settled())
            return
        if len(places) == 1:
            host = self._host_of(next(iter(places)))
            if host is not None and host.is_loaded:
                host.submit(command, answer)
            else:  # no lock survives a reload
                answer(Settled(list(range(len(tokens)))))
            return
        merged = MergedSettlement(len(places), answer)
        for partition_id, indexes in places.items():
            part = replace(command, lock_tokens=[tokens[index] for index in indexes])
            self._settle_part(partition_id, part, merged.taking(indexes), REPEATS)

    def _settle_part(
        self,
        partition_id: int,
        part: Settle | CheckLocks,
        answer: OnReply[Settled],
        repeats: int,
    ) -> None:
        """Repeat failed reads: the client cannot, because it gets one reply for all parts."""
        host = self._host_of(partition_id)
        if host is None or not host.is_loaded:
            answer(GONE)
            return

        def take(reply: Settled | Refused) -> None:
            is_unread = isinstance(reply, Refused) and reply.refusal is Refusal.NOT_APPLIED
            if is_unread and repeats:
                asyncio.get_running_loop().call_later(
                    REPEAT_S, self._settle_part, partition_id, part, answer, repeats - 1
                )
            else:
                answer(reply)

        host.submit(part, take)

    def _renew(self, command: RenewLocks, answer: OnReply[LocksRenewed]) -> None:
        """Renew all or none within a partition; locks renewed in other partitions stay renewed."""
        tokens = command.lock_tokens
        places = split([partition_of_token(token) for token in tokens])
        parts: list[tuple[Host, RenewLocks]] = []
        for partition_id, indexes in places.items():
            host = self._host_of(partition_id)
            if host is None:
                answer(GONE)
                return
            parts.append((host, replace(command, lock_tokens=[tokens[n] for n in indexes])))

        def take(replies: list[LocksRenewed | Refused]) -> None:
            until_ms = [0] * len(tokens)
            for reply, indexes in zip(replies, places.values(), strict=True):
                if isinstance(reply, Refused):
                    answer(reply)
                    return
                for index, each_ms in zip(indexes, reply.locked_until_ms, strict=True):
                    until_ms[index] = each_ms
            answer(LocksRenewed(until_ms))

        submit_all(parts, take)

    # --- receiving ------------------------------------------------------------------------------

    def _add_consumer(self, command: AddConsumer, answer: OnReply[Done]) -> None:
        sink = self._sinks.get(command.consumer_id)
        if sink is None or command.consumer_id in self._consumers:
            answer(Done())
            return
        consumer = PartitionedConsumer(self._hosts, command, sink, answer, next(self._next))
        if not consumer.is_closed:
            self._consumers[command.consumer_id] = consumer

    def _set_demand(self, command: SetDemand, answer: OnReply[DemandSet]) -> None:
        host = self._session_hosts.get(command.consumer_id)
        consumer = self._consumers.get(command.consumer_id)
        if host is not None:
            host.submit(command, answer)
        elif consumer is not None and not consumer.is_closed:
            consumer.set_demand(command, answer)
        else:
            answer(Refused(Refusal.ENTITY_NOT_FOUND))

    def _remove_consumer(self, command: RemoveConsumer, answer: OnReply[Done]) -> None:
        consumer_id = command.consumer_id
        self.unregister_sink(consumer_id)
        consumer = self._consumers.pop(consumer_id, None)
        if consumer is not None:
            consumer.remove()
        host = self._session_hosts.pop(consumer_id, None)
        if host is not None:
            host.submit(command, answer)
        else:
            answer(Done())

    # --- sessions -------------------------------------------------------------------------------

    def _accept_session(self, command: AcceptSession, answer: OnReply[Done]) -> None:
        consumer_id = command.consumer_id
        sink = self._sinks.get(consumer_id)
        if sink is None:
            answer(Refused(Refusal.NOT_APPLIED, "the consumer was removed"))
            return
        held = _SessionSink(sink, partial(self._forget_session, consumer_id))
        if command.session_id is not None:
            host = self._session_hosts[consumer_id] = self._host_of_key(command.session_id)
            host.register_sink(consumer_id, held)
            host.submit(command, answer)
            return

        def found(host: Host, session_id: bytes, locked_until_ms: int) -> None:
            self._seekers.pop(consumer_id, None)
            self._session_hosts[consumer_id] = host
            host.register_sink(consumer_id, held)
            sink.granted(session_id, locked_until_ms)

        seeker = SessionSeeker(self._hosts, command, answer, found, sink.ended, next(self._next))
        self._seekers[consumer_id] = seeker
        seeker.start()

    def _forget_session(self, consumer_id: int) -> None:
        """Forget a consumer that its partition no longer serves; its endpoint may add a new one."""
        self._session_hosts.pop(consumer_id, None)
        self._sinks.pop(consumer_id, None)

    def _list_sessions(self, command: ListSessions, answer: OnReply[SessionsListed]) -> None:
        """Merge the lists of all partitions; an unavailable one fails the request."""
        part = replace(command, skip=0, top=command.skip + command.top)

        def take(replies: list[SessionsListed | Refused]) -> None:
            lists: list[list[bytes]] = []
            for reply in replies:
                if isinstance(reply, Refused):
                    answer(reply)
                    return
                lists.append(reply.session_ids)
            merged = itertools.islice(heapq.merge(*lists), command.skip, command.skip + command.top)
            answer(SessionsListed(list(merged)))

        submit_all([(host, part) for host in self._hosts], take)

    # --- by number ------------------------------------------------------------------------------

    def _peek(self, command: Peek, answer: OnReply[Peeked]) -> None:
        """Search upwards from the partition of the number for the first with messages."""
        first = max(partition_of_number(command.from_sequence), 0)
        hosts = self._hosts[first:]
        if command.session_id is not None:
            home = self._host_of_key(command.session_id)
            hosts = [home] if home in hosts else []
        Walk(hosts, command, answer).go_on()

    def _cancel(self, command: CancelScheduled, answer: OnReply[Cancelled]) -> None:
        """Cancel all or none of each partition's numbers."""
        parts = self._by_number(command.sequence_numbers)
        if parts is None:
            answer(NOT_FOUND)
            return

        def take(replies: list[Cancelled | Refused]) -> None:
            refused = [each for each in replies if isinstance(each, Refused)]
            answer(refused[0] if refused else Cancelled())

        submit_all(
            [(host, replace(command, sequence_numbers=numbers)) for host, numbers in parts], take
        )

    def _receive_deferred(
        self, command: ReceiveDeferred, answer: OnReply[DeferredReceived]
    ) -> None:
        """Receive all or none: received messages are released if a partition lacks one.

        Over several partitions a receive-and-delete locks first and then completes.
        """
        numbers = command.sequence_numbers
        parts = self._by_number(numbers)
        if parts is None:
            answer(NOT_FOUND)
            return
        if len(parts) == 1:
            parts[0][0].submit(command, answer)
            return
        is_locking = command.mode is ReceiveMode.PEEK_LOCK

        def take(replies: list[DeferredReceived | Refused]) -> None:
            taken = [each for each in replies if isinstance(each, DeferredReceived)]
            deliveries = [each for reply in taken for each in reply.deliveries]
            tokens = [each.lock_token for each in deliveries]
            settle = partial(Settle, command.entity_no, command.sub_queue, tokens)
            if len(taken) < len(replies):
                self.submit(settle(Disposition.RELEASE))
                answer(next(each for each in replies if isinstance(each, Refused)))
                return
            place = {number: index for index, number in enumerate(numbers)}
            deliveries.sort(key=lambda each: place[each.sequence])
            if is_locking:
                answer(DeferredReceived(deliveries))
            else:
                self._settle(
                    settle(Disposition.COMPLETE),
                    lambda reply: completed(deliveries, tokens, reply),
                )

        def completed(
            deliveries: list[Delivery], tokens: list[bytes], reply: Settled | Refused
        ) -> None:
            if isinstance(reply, Refused):
                answer(reply)
                return
            lost = {tokens[index] for index in reply.lost or ()}
            answer(
                DeferredReceived(
                    [
                        each._replace(lock_token=b"", locked_until_ms=0)
                        for each in deliveries
                        if each.lock_token not in lost
                    ]
                )
            )

        locking = replace(command, mode=ReceiveMode.PEEK_LOCK)
        submit_all([(host, replace(locking, sequence_numbers=part)) for host, part in parts], take)

    def _by_number(self, numbers: list[int]) -> list[tuple[Host, list[int]]] | None:
        """Return partition -> its numbers, None if one belongs to a partition that does not
        exist.
        """
        places = split([partition_of_number(number) for number in numbers])
        found: list[tuple[Host, list[int]]] = []
        for partition_id, indexes in places.items():
            host = self._host_of(partition_id)
            if host is None:
                return None
            found.append((host, [numbers[index] for index in indexes]))
        return found or None

    # --- internals ------------------------------------------------------------------------------

    def _host_of(self, partition_id: int) -> Host | None:
        return self._hosts[partition_id] if 0 <= partition_id < len(self._hosts) else None

    def _host_of_key(self, key: bytes) -> Host:
        return self._hosts[partition_of_key(key, len(self._hosts))]


def _ignore(_: object) -> None:
    """Ignore a reply."""


def _reluctance(host: Host) -> int:
    """Return a sort key of partitions: those that can store a message soonest come first."""
    if host.status is HostStatus.LOADING:
        return 1 if host.trouble is None else 3
    return 2 if host.is_full else 0


class _SessionSink:
    """The sink of a receiver that one partition serves; reports when it no longer does."""

    __slots__ = ("_forget", "_sink")

    def __init__(self, sink: DeliverySink, forget: Callable[[], object]) -> None:
        self._sink = sink
        self._forget = forget

    def deliver(self, deliveries: list[Delivery]) -> None:
        self._sink.deliver(deliveries)

    def granted(self, session_id: bytes, locked_until_ms: int) -> None:
        self._sink.granted(session_id, locked_until_ms)

    def available(self, count: int) -> None:
        self._sink.available(count)

    def ended(self, refused: Refused) -> None:
        self._forget()
        self._sink.ended(refused)

    def reset(self) -> None:
        self._forget()
        self._sink.reset()
