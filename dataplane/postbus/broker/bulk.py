"""Reader groups and reads of ranges over the partitions of an entity (ADR 42).

Called by the bulk API. The partitions of an entity do not know each other: the home decides about a
group, and its decision is passed on to the cursors of all partitions before the answer. A call that
fails between the two is repeated by its caller; until then cursors lag behind the home, which only
keeps messages for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from postbus.broker.address import Address
from postbus.broker.partition.host import Host
from postbus.broker.placement import SPREAD
from postbus.broker.router import Router
from postbus.broker.row_chunks import PartitionRanges, RowChunk, divided
from postbus.broker.spread.replies import away
from postbus.entity.commands import Refusal, Refused, SubQueue
from postbus.entity.expects import Expects, R
from postbus.entity.group_commands import (
    NO_LIMITS,
    ClaimGroup,
    Cursor,
    DropGroup,
    FollowHome,
    GroupKind,
    Limits,
    ListGroups,
    ListRanges,
    PlacedCursor,
    Plan,
    PlanRange,
    PutGroup,
    Ranges,
    RangesListed,
    RejectRows,
    ResetGroup,
    SettleRange,
)
from postbus.entity.groups import WHOLE_DRAIN, end_refusal, group_fenced, group_not_found
from postbus.entity.message_operations import MAX_SEQUENCE_NUMBERS
from postbus.store.bulk_reads import FIRST_ROWS, NO_ENTITY, next_limit
from postbus.store.errors import StoreError
from postbus.store.pinned import Pinned, joined

Start: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[int, int]

MAX_SPLITS: Final = 1_024


class BulkRefused(Exception):
    """A call was refused; nothing was done, or what was done can be repeated."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused.detail)


class RowsMissing(Exception):
    """Rows of a range were deleted, because their retention ended before they were read."""

    def __init__(self, partition_id: int, position: int, low: int) -> None:
        super().__init__(
            f"messages below position {low} of partition {partition_id} are deleted, and the reader"
            f" goes on at {position}: reset the group to accept that, or keep a longer history"
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A group as its home has it. `is_new`: the call created it."""

    name: str
    cursor: Cursor
    plan: Plan
    is_new: bool = False


class ListedGroup(NamedTuple):
    """A group with its place. `unread`: how many messages lie behind its plan at most.

    `pinned`: the last estimate of what it keeps; `lag_s`: age of the first message that is not
    processed, 0 without one. None: unknown.
    """

    address: Address
    group: Group
    unread: int | None
    pinned: Pinned | None
    lag_s: float | None


class BulkAccess:
    """See the module's docstring. A call that is refused raises `BulkRefused`."""

    def __init__(self, router: Router, hosts: Sequence[Host], created_ms: int) -> None:
        """Take the hosts of all partitions in order, and the time when the bus was created."""
        self._router = router
        self._hosts = hosts
        self._created_ms = created_ms
        self._locks: WeakValueDictionary[tuple[int, SubQueue], asyncio.Lock] = WeakValueDictionary()

    def generation(self, address: Address) -> str:
        """Return what changes when an entity is deleted and created again."""
        return f"{self._created_ms}/{address.entity_no}"

    async def resolve(self, path: str) -> Address:
        """Return the address of a path such as `orders/$DeadLetterQueue`."""
        resolved: asyncio.Future[Address | None] = asyncio.get_running_loop().create_future()
        self._router.resolve(path, resolved.set_result)
        address = await resolved
        if address is None:
            raise BulkRefused(Refused(Refusal.ENTITY_NOT_FOUND, f"there is no {path}"))
        return address

    # --- groups ---------------------------------------------------------------------------------

    async def list_groups(self) -> tuple[list[ListedGroup], tuple[int, ...]]:
        """Return all groups in order, and the partitions that are unavailable."""
        listed: dict[int, list[PlacedCursor]] = {}
        for host in self._hosts:
            with suppress(BulkRefused):
                listed[host.partition_id] = (await self._call(host, ListGroups())).cursors
        ends: dict[tuple[int, SubQueue], dict[int, int]] = {}
        for number, cursors in listed.items():
            for each in cursors:
                place = each.entity_no, each.sub_queue
                ends.setdefault(place, {})[number] = each.next_position
        found: list[ListedGroup] = []
        for each in (each for cursors in listed.values() for each in cursors):
            address = self._router.address_of(each.entity_no, each.sub_queue)
            if each.cursor.plan is not None and address is not None:
                group = Group(each.name, each.cursor, each.cursor.plan)
                found.append(await self._listed(address, group, ends[_place(address)]))
        away = (host.partition_id for host in self._hosts if host.partition_id not in listed)
        return sorted(found, key=lambda each: (each.address.name, each.group.name)), tuple(away)

    async def listed(self, address: Address, group: Group) -> ListedGroup:
        """Return a group as `list_groups` does."""
        try:
            ends = await self._ends(address)
        except BulkRefused:
            ends = {}
        return await self._listed(address, group, ends)

    async def _listed(self, address: Address, group: Group, ends: Mapping[int, int]) -> ListedGroup:
        unread = await self._unread(address, group, ends)
        pinned, lag_s = self._pinned(address, group.name), None
        if pinned is not None:
            now_ms = self._home(address).clock()
            age_ms = 0 if pinned.oldest_ms is None else now_ms - pinned.oldest_ms
            lag_s = max(age_ms, 0) / 1_000
        return ListedGroup(address, group, unread, pinned, lag_s)

    async def _unread(self, address: Address, group: Group, ends: Mapping[int, int]) -> int | None:
        """`ends`: the position behind the last message of each partition that is available."""
        count = 0
        for number, host in self._partitions(address).items():
            if number not in ends:
                return None
            _, planned = group.plan.ranges.get(number, (0, 0))
            try:
                blocks = await host.bulk.blocks(*_place(address), planned, ends[number])
            except StoreError:
                return None
            count += sum(block.end - block.first for block in blocks)
        return count

    def _pinned(self, address: Address, name: str) -> Pinned | None:
        place = (*_place(address), name)
        parts = [host.pinned(place) for host in self._partitions(address).values()]
        known = [part for part in parts if part is not None]
        return joined(known) if len(known) == len(parts) else None

    async def put_group(
        self,
        address: Address,
        name: str,
        start: Start | None = None,
        kind: GroupKind = GroupKind.TAP,
        limits: Limits | None = None,
    ) -> Group:
        """Create a group, or return the existing one; completes an interrupted creation.

        `start` None: a tap begins behind the newest message, a drain with the oldest. `limits`
        replace those of an existing group; None keeps them.
        """
        if start is None:
            start = "earliest" if kind is GroupKind.DRAIN else "latest"
        elif kind is GroupKind.DRAIN and start != "earliest":
            raise BulkRefused(WHOLE_DRAIN)
        if limits is not None and limits != NO_LIMITS:
            limits = limits._replace(parts=len(self._partitions(address)))
        async with self._lock(address):
            await self._refuse_half_a_group(address, name)
            return await self._put_group(address, name, start, kind, limits)

    async def _put_group(
        self, address: Address, name: str, start: Start, kind: GroupKind, limits: Limits | None
    ) -> Group:
        home = self._home(address)
        starts = await self._positions(address, start)
        puts = await asyncio.gather(
            *(
                self._call(host, PutGroup(*_place(address), name, kind, starts.get(number), limits))
                for number, host in self._partitions(address).items()
            )
        )
        cursors = dict(zip(self._partitions(address), (put.cursor for put in puts), strict=True))
        if cursors[home.partition_id].plan is not None:
            return await self._followed(address, name, cursors[home.partition_id])
        # A cursor that an interrupted drop has left may be further on; a drain begins with all.
        positions = {
            number: 0 if kind is GroupKind.DRAIN else cursor.settled
            for number, cursor in cursors.items()
        }
        first = ResetGroup(*_place(address), name, positions, is_first=True)
        decided = await self._call(home, first)
        return await self._followed(address, name, decided.cursor, is_placed=True, is_new=True)

    async def group(self, address: Address, name: str) -> Group:
        """Return a group."""
        listed = await self._call(self._home(address), ListRanges(*_place(address), name))
        return _group(name, listed.cursor)

    async def drop_group(self, address: Address, name: str) -> None:
        """Delete a group, of which something must exist.

        The home goes first, since no reader may use a group that lacks one of its cursors: what
        that partition deletes is noted nowhere. A repeated call deletes the rest.
        """
        home = self._home(address)
        others = [host for host in self._partitions(address).values() if host is not home]
        command = DropGroup(*_place(address), name)
        async with self._lock(address):
            dropped = [await self._call(home, command)]
            dropped += await asyncio.gather(*(self._call(host, command) for host in others))
        if not any(each.existed for each in dropped):
            raise BulkRefused(group_not_found(name))

    async def reset_group(self, address: Address, name: str, start: Start) -> Group:
        """Let a group go on elsewhere; its reader is refused from then on."""
        group = await self.group(address, name)
        if group.cursor.kind is GroupKind.DRAIN and start != "earliest":
            raise BulkRefused(WHOLE_DRAIN)
        ends = await self._ends(address)
        wanted = await self._positions(address, start)
        if wanted and wanted.keys() != ends.keys():
            text = f"name a position of each of the partitions {sorted(ends)}"
            raise BulkRefused(Refused(Refusal.ARGUMENT_OUT_OF_RANGE, text))
        positions = {number: min(wanted.get(number, end), end) for number, end in ends.items()}
        decided = await self._call(
            self._home(address), ResetGroup(*_place(address), name, positions)
        )
        return await self._followed(address, name, decided.cursor, is_placed=True)

    async def claim_group(self, address: Address, name: str, reader: str) -> Group:
        """Claim a group for a reader; earlier ones are refused from then on."""
        decided = await self._call(self._home(address), ClaimGroup(*_place(address), name, reader))
        return await self._followed(address, name, decided.cursor)

    async def plan_ranges(self, address: Address, name: str, epoch: int, ranges: Ranges) -> Group:
        """Plan to read ranges, which settles the plan before."""
        partitions = self._partitions(address)
        for number, (_, end) in sorted(ranges.items()):
            if number in partitions:
                listed = await self._call(partitions[number], ListRanges(*_place(address), name))
                if (refused := end_refusal(listed, end, number)) is not None:
                    raise BulkRefused(refused)
        decided = await self._call(
            self._home(address), PlanRange(*_place(address), name, epoch, ranges)
        )
        return await self._followed(address, name, decided.cursor)

    async def settle_plan(self, address: Address, name: str, epoch: int, number: int) -> Group:
        """Record that a plan is processed."""
        decided = await self._call(
            self._home(address), SettleRange(*_place(address), name, epoch, number)
        )
        return await self._followed(address, name, decided.cursor)

    async def reject_rows(
        self,
        address: Address,
        partition_id: int,
        positions: Sequence[int],
        *,
        group: str,
        epoch: int,
        reason: str,
        description: str,
    ) -> tuple[int, dict[int, Refused]]:
        """Dead-letter messages of the planned range; a repeated call changes nothing more.

        Returns how many were dead-lettered now, and by position why others cannot be.
        """
        host = self._host(address, partition_id)
        left = sorted(set(positions))
        rejected, refused = 0, {}
        while left:
            part = left[:MAX_SEQUENCE_NUMBERS]
            done = await self._call(
                host, RejectRows(*_place(address), group, epoch, part, reason, description)
            )
            rejected += done.rejected
            refused.update(done.refused)
            left = done.left + left[len(part) :]
        return rejected, refused

    async def _refuse_half_a_group(self, address: Address, name: str) -> None:
        """Raise if a partition has lost its cursor of a group, as after a restore of its store."""
        partitions = self._partitions(address)
        listed = await asyncio.gather(
            *(self._call(host, ListRanges(*_place(address), name)) for host in partitions.values())
        )
        cursors = dict(zip(partitions, (each.cursor for each in listed), strict=True))
        home = cursors[self._home(address).partition_id]
        without = sorted(number for number, cursor in cursors.items() if cursor is None)
        if without and home is not None and home.plan is not None:
            text = (
                f"the partitions {without} have lost the reader group {name}, and perhaps messages"
                " that it has not read: drop the group and create it again to accept that"
            )
            raise BulkRefused(Refused(Refusal.CONFLICT, text))

    def _lock(self, address: Address) -> asyncio.Lock:
        """Return the lock under which groups are created and dropped, in several steps."""
        key = _place(address)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    async def _followed(
        self,
        address: Address,
        name: str,
        cursor: Cursor,
        *,
        is_placed: bool = False,
        is_new: bool = False,
    ) -> Group:
        """Pass a decision of the home on to all partitions."""
        group = _group(name, cursor, is_new=is_new)
        partitions = self._partitions(address)
        if group.plan.ranges.keys() != partitions.keys():
            text = "the partitions of the entity differ from those of the group: create it again"
            raise BulkRefused(Refused(Refusal.CONFLICT, text))
        await asyncio.gather(
            *(
                self._call(
                    host,
                    FollowHome(
                        *_place(address),
                        name,
                        cursor.epoch,
                        cursor.reader,
                        group.plan.settled_at(number),
                        group.plan.ranges[number][1],
                        is_placed,
                    ),
                )
                for number, host in partitions.items()
                if len(partitions) > 1
            )
        )
        return group

    # --- ranges ---------------------------------------------------------------------------------

    async def ranges(
        self, address: Address, splits: int, group: str | None = None
    ) -> list[PartitionRanges]:
        """Return what can be read of each partition, divided into about `splits` equal parts.

        By a group if one is named: from its settled position on nothing is missing for it.
        """
        return list(
            await asyncio.gather(
                *(
                    self._ranges_of(address, host, min(max(splits, 1), MAX_SPLITS), group)
                    for host in self._partitions(address).values()
                )
            )
        )

    async def _ranges_of(
        self, address: Address, host: Host, splits: int, group: str | None
    ) -> PartitionRanges:
        listed = await self._call(host, ListRanges(*_place(address), group))
        low = await self._low(address, host, group)
        with store_errors():
            blocks = await host.bulk.blocks(*_place(address), low, listed.readable)
        return PartitionRanges(
            host.partition_id,
            low,
            listed.readable,
            listed.live,
            listed.deferred,
            listed.average_bytes,
            divided(blocks, splits),
        )

    async def rows(
        self,
        address: Address,
        partition_id: int,
        first: int,
        end: int,
        *,
        group: str,
        epoch: int,
        with_properties: bool,
        with_body: bool,
    ) -> AsyncGenerator[RowChunk]:
        """Yield the rows of a range in order.

        Raises `BulkRefused`, and `RowsMissing` if some were deleted, also after the first chunk.
        """
        host = self._host(address, partition_id)
        if first > end:
            text = "a range ends before it begins"
            raise BulkRefused(Refused(Refusal.ARGUMENT_OUT_OF_RANGE, text))
        listed = await self._call(host, ListRanges(*_place(address), group))
        _check_reader(listed, group, epoch)
        is_drain = listed.cursor is not None and listed.cursor.kind is GroupKind.DRAIN
        if listed.cursor is not None and is_drain and end > listed.cursor.planned:
            text = "a group that drains reads what it has planned: plan the range first"
            raise BulkRefused(Refused(Refusal.NOT_ALLOWED, text))
        if listed.cursor is not None and is_drain and first < listed.cursor.settled:
            text = f"what lies below {listed.cursor.settled} is settled, and gone with that"
            raise BulkRefused(Refused(Refusal.STALE_CHECKPOINT, text))
        if (refused := end_refusal(listed, end, partition_id)) is not None:
            raise BulkRefused(refused)
        with store_errors():
            blocks = await host.bulk.blocks(*_place(address), first, end)
        # Blocks without rows are forgotten: their rows are missing below this mark.
        _check_low(partition_id, first, await self._low(address, host, group))
        limit = FIRST_ROWS
        for block in blocks:
            rest = block
            while rest.first < rest.end:
                with store_errors():
                    chunk = await host.bulk.read(
                        *_place(address),
                        rest,
                        limit,
                        group=group,
                        is_drain=is_drain,
                        with_properties=with_properties,
                        with_body=with_body,
                    )
                _check_low(partition_id, rest.first, chunk.low)
                if not chunk.last_position:
                    break
                limit = next_limit(limit, chunk)
                yield RowChunk(chunk, block.offset)
                rest = rest._replace(first=chunk.last_position + 1)

    async def _positions(self, address: Address, start: Start) -> dict[int, int]:
        """Return a position of each partition; none for `latest`."""
        if start == "latest":
            return {}
        if start == "earliest":
            return dict.fromkeys(self._partitions(address), 0)
        if not isinstance(start, datetime):
            assert not isinstance(start, str)
            return dict(start)
        time_ms = int(start.timestamp() * 1_000)
        ends = await self._ends(address)
        found = {}
        for number, host in self._partitions(address).items():
            with store_errors():
                found[number] = await host.bulk.position_at(*_place(address), time_ms, ends[number])
        return found

    async def _low(self, address: Address, host: Host, group: str | None) -> int:
        with store_errors():
            low = await host.bulk.low_mark(*_place(address), group)
        _check_low(host.partition_id, low, low)
        return low

    async def _ends(self, address: Address) -> dict[int, int]:
        """Return the position behind the last message of each partition."""
        listed = await self.listed_hosts(address)
        return {number: each.next_position for number, (_, each) in listed.items()}

    async def listed_hosts(
        self, address: Address, partition_id: int | None = None
    ) -> dict[int, tuple[Host, RangesListed]]:
        """Return each partition of an entity, or the one named, with what can be read of it."""
        hosts = self._partitions(address)
        if partition_id is not None:
            hosts = {partition_id: self._host(address, partition_id)}
        listed = await asyncio.gather(
            *(self._call(host, ListRanges(*_place(address))) for host in hosts.values())
        )
        pairs = zip(hosts.values(), listed, strict=True)
        return dict(zip(hosts, pairs, strict=True))

    # --- partitions -----------------------------------------------------------------------------

    def _partitions(self, address: Address) -> dict[int, Host]:
        if address.partition_id == SPREAD:
            return dict(enumerate(self._hosts))
        return {address.partition_id: self._hosts[address.partition_id]}

    def _host(self, address: Address, partition_id: int) -> Host:
        host = self._partitions(address).get(partition_id)
        if host is None:
            text = f"the entity has no partition {partition_id}"
            raise BulkRefused(Refused(Refusal.ARGUMENT_OUT_OF_RANGE, text))
        return host

    def _home(self, address: Address) -> Host:
        return next(iter(self._partitions(address).values()))

    async def _call(self, host: Host, command: Expects[R]) -> R:
        """Return the reply of a partition; raises `BulkRefused`."""
        if (refused := away(host)) is not None:
            raise BulkRefused(refused)
        reply = await host.call(command)
        if isinstance(reply, Refused):
            raise BulkRefused(reply)
        return reply


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise `BulkRefused` for a store that cannot be read."""
    try:
        yield
    except StoreError as error:
        text = f"the store cannot be read: {error}"
        raise BulkRefused(Refused(Refusal.NOT_APPLIED, text)) from error


def _place(address: Address) -> tuple[int, SubQueue]:
    return address.entity_no, address.sub_queue


def _group(name: str, cursor: Cursor | None, *, is_new: bool = False) -> Group:
    if cursor is None or cursor.plan is None:
        raise BulkRefused(group_not_found(name))
    return Group(name, cursor, cursor.plan, is_new)


def _check_reader(listed: RangesListed, name: str, epoch: int) -> None:
    if listed.cursor is None:
        raise BulkRefused(group_not_found(name))
    if epoch != listed.cursor.epoch:
        raise BulkRefused(group_fenced(name, listed.cursor))


def _check_low(partition_id: int, position: int, low: int) -> None:
    """Raise when rows from a position on may be missing."""
    if low == NO_ENTITY:
        raise BulkRefused(Refused(Refusal.ENTITY_NOT_FOUND, "the entity was deleted"))
    if low > position:
        raise RowsMissing(partition_id, position, low)
