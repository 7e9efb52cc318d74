"""Reads of ranges as they are now, without a reader group: what is live, and what is kept.

Called by the bulk API. Nothing is changed or kept for the reader: what is settled between two calls
is in the second one no more, unless the entity has a history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from postbus.broker.address import Address
from postbus.broker.bulk import MAX_SPLITS, BulkAccess, BulkRefused, store_errors
from postbus.broker.partition.host import Host
from postbus.broker.row_chunks import PartitionRanges, RowChunk, divided
from postbus.contract.bulk import MAX_POSITION, Selection
from postbus.entity.commands import Refusal, Refused, SubQueue
from postbus.entity.group_commands import RangesListed
from postbus.store.browse_rows import Piece
from postbus.store.bulk_reads import FIRST_ROWS, NO_ENTITY, next_limit


class Browse:
    """See the module's docstring. A call that is refused raises `BulkRefused`."""

    def __init__(self, access: BulkAccess) -> None:
        self._access = access

    async def ranges(
        self, address: Address, splits: int, selection: Selection
    ) -> list[PartitionRanges]:
        """Return what can be read of each partition, divided into about `splits` equal parts."""
        hosts = await self._access.listed_hosts(address)
        count = min(max(splits, 1), MAX_SPLITS)
        return list(
            await asyncio.gather(
                *(
                    self._ranges_of(address, host, listed, count, selection)
                    for host, listed in hosts.values()
                )
            )
        )

    async def _ranges_of(
        self, address: Address, host: Host, listed: RangesListed, count: int, selection: Selection
    ) -> PartitionRanges:
        pieces = await self._pieces(address, host, listed.next_position, selection)
        return PartitionRanges(
            host.partition_id,
            pieces[0].first if pieces else listed.next_position,
            pieces[-1].end if pieces else listed.next_position,
            listed.live,
            listed.deferred,
            listed.average_bytes,
            divided(pieces, count),
        )

    async def _pieces(
        self, address: Address, host: Host, next_position: int, selection: Selection
    ) -> list[Piece]:
        """Return where rows may lie: below the position of the next message, or scheduled.

        Times do not narrow it: a scheduled message that becomes active late carries an earlier time
        than the messages before it.
        """
        place = address.entity_no, address.sub_queue
        with store_errors():
            pieces = await host.browse.pieces(*place, 0, MAX_POSITION, selection)
        cut = (
            piece
            if piece.sub_queue is SubQueue.SCHEDULED
            else piece._replace(end=min(piece.end, next_position))
            for piece in pieces
        )
        return [piece for piece in cut if piece.first < piece.end]

    async def rows(
        self,
        address: Address,
        partition_id: int,
        first: int,
        end: int,
        selection: Selection,
        *,
        with_properties: bool,
        with_body: bool,
        with_present: bool,
        with_deliveries: bool,
    ) -> AsyncGenerator[RowChunk]:
        """Yield the rows of a range in order.

        `with_deliveries`: `with_present` counts those of the last moments, too. A chunk without
        rows says that the reader is not forgotten: many may be left out. Raises `BulkRefused`, also
        after the first chunk.
        """
        if first > end:
            text = "a range ends before it begins"
            raise BulkRefused(Refused(Refusal.ARGUMENT_OUT_OF_RANGE, text))
        [(host, _)] = (await self._access.listed_hosts(address, partition_id)).values()
        place = address.entity_no, address.sub_queue
        with store_errors():
            pieces = await host.browse.pieces(*place, first, end, selection)
        limit = FIRST_ROWS
        for piece in pieces:
            rest, attempts = piece, None
            if with_deliveries:
                with store_errors():
                    attempts = await host.browse.attempts(piece)
            while rest.first < rest.end:
                with store_errors():
                    columns, present = await host.browse.read(
                        address.entity_no,
                        rest,
                        limit,
                        selection,
                        with_properties=with_properties,
                        with_body=with_body,
                        with_present=with_present,
                        attempts=attempts,
                    )
                if columns.low == NO_ENTITY:
                    raise BulkRefused(Refused(Refusal.ENTITY_NOT_FOUND, "the entity was deleted"))
                if not columns.last_position:
                    break
                limit = next_limit(limit, columns)
                yield RowChunk(columns, piece.offset, present if with_present else None)
                rest = rest._replace(first=columns.last_position + 1)
