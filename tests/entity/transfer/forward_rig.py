"""Partitions joined by a shipper that a test drives step by step and may cut anywhere.

Crashes lose the same state here: an answer to the source is dropped when the source crashed,
a message that was submitted to a target is sent again when the target crashed before its commit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from postbus.entity.commands import Arrive, Arrived, Refusal, Refused, Reply, Shipped, SubQueue
from postbus.entity.outcomes import Ship
from postbus.entity.transfer.outbox import OUTBOX_NO
from postbus.message.envelope import Envelope
from tests.entity.partition_rig import Rig, name_of

REPEATED = (Refusal.BUSY, Refusal.UNKNOWN, Refusal.NOT_APPLIED, Refusal.STORE_FULL)


def forwarded(envelope: Envelope, source: bytes | None, is_hop: bool = True) -> Envelope:
    """Copy an envelope as the shipper does."""
    fields = {slot: getattr(envelope, slot) for slot in Envelope.__slots__}
    fields["hop_count"] += is_hop
    if source is not None and "dead_letter_source" in fields:
        fields["dead_letter_source"] = source
    return Envelope(**fields)


@dataclass
class Hop:
    """One `Ship` on its way."""

    source: int
    target: int | None
    entity_no: int
    ship: Ship
    epochs: tuple[int, int]
    replies: list[Reply] | None = None


@dataclass
class Bus:
    """`places`: name of an entity -> (partition, entity_no); others do not exist."""

    rigs: dict[int, Rig]
    places: dict[str, tuple[int, int]]
    hops: list[Hop] = field(default_factory=list)

    def start(self) -> None:
        """Start the shipments that partitions offer; drop the answers of crashed sources."""
        self.hops = [hop for hop in self.hops if hop.epochs[0] == self.epoch(hop.source)]
        for number, rig in self.rigs.items():
            ships, rig.ships = rig.ships, []
            for ship in ships:
                assert all(
                    hop.ship.target.lower() != ship.target.lower() for hop in self.hops_of(number)
                )
                target, entity_no = self.places.get(ship.target.lower(), (None, 0))
                epochs = (self.epoch(number), 0 if target is None else self.epoch(target))
                self.hops.append(Hop(number, target, entity_no, ship, epochs))

    def hops_of(self, source: int) -> list[Hop]:
        return [hop for hop in self.hops if hop.source == source]

    def epoch(self, number: int) -> int:
        return self.rigs[number].tables.epoch

    def send(self, hop: Hop) -> None:
        """Submit to the target, again if it crashed meanwhile."""
        if hop.target is None:
            hop.replies = [Arrived(0, Refused(Refusal.ENTITY_NOT_FOUND))]
            return
        if hop.replies is not None and (hop.replies or hop.epochs[1] == self.epoch(hop.target)):
            return
        hop.epochs = (hop.epochs[0], self.epoch(hop.target))
        rows = {row.row_key: row for row in self.rigs[hop.source].tables.read(hop.ship.numbers)}
        envelopes = [
            forwarded(envelope or rows[number].envelope, source, number not in hop.ship.resent)
            for number, envelope, source in zip(
                hop.ship.numbers, hop.ship.envelopes, hop.ship.sources, strict=True
            )
        ]
        ship = hop.ship
        command = Arrive(hop.source, hop.entity_no, ship.numbers, envelopes, ship.resent)
        hop.replies = self.rigs[hop.target].submit(command)

    def answer(self, hop: Hop) -> bool:
        """Report the target's answer to the source; return whether there was one."""
        if not hop.replies:
            return False
        (reply,) = hop.replies
        assert isinstance(reply, Arrived)
        refused: dict[int, Refused] = {}
        if reply.refused is not None:
            if reply.refused.refusal in REPEATED:
                hop.replies = None
                return False
            refused[hop.ship.numbers[reply.count]] = reply.refused
        self.hops.remove(hop)
        arrived = hop.ship.numbers[: reply.count]
        self.rigs[hop.source].submit(Shipped(hop.ship.target, arrived, refused))
        return True

    def crash(self, number: int) -> None:
        self.rigs[number].crash()
        self.start()

    def settle(self) -> None:
        """Let everything arrive that can."""
        for _ in range(1_000):
            for rig in self.rigs.values():
                rig.commit()
                rig.tick_now()
            self.start()
            for hop in list(self.hops):
                self.send(hop)
            for rig in self.rigs.values():
                rig.commit()
            moved = [self.answer(hop) for hop in list(self.hops)]
            if not any(moved) and not any(rig.pending or rig.ships for rig in self.rigs.values()):
                return
        raise AssertionError("the outboxes never become empty")

    def where(self) -> dict[str, Counter[tuple[int, int, SubQueue]]]:
        """Return for each message name where its rows are: (partition, entity, sub-queue)."""
        found: dict[str, Counter[tuple[int, int, SubQueue]]] = {}
        for number, rig in self.rigs.items():
            for row_key, (_, envelope) in rig.tables.rows.items():
                block = rig.tables.block_of(row_key)
                place = (number, block.entity_no, block.sub_queue)
                found.setdefault(name_of(envelope), Counter())[place] += 1
                assert (row_key in rig.tables.outbound) is (block.entity_no == OUTBOX_NO)
        return found
