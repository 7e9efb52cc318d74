"""Offsets: the position that is read next in each partition, as checkpoints hold them.

    {"v": 1, "entity": "orders", "generation": "…", "p": {"0": 123}}

Ranges are half-open. Spark treats offsets as opaque text; they must say themselves what they are
for, since a checkpoint may be used with other options than it was written with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from postbus_spark.errors import EntityRecreated, InvalidOffset

VERSION: Final = 1
MAX_POSITION: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Offset:
    """`generation` changes when an entity is deleted and created again."""

    entity: str
    generation: str
    positions: Mapping[int, int]

    @classmethod
    def of(cls, given: object) -> Offset:
        """Return an offset of its JSON. Raises `ValueError`."""
        if not isinstance(given, dict):
            raise ValueError("an offset is a JSON object")
        version = given.get("v")
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"an offset of version {version} needs a newer connector")
        if type(version) is not int or version != VERSION or given.keys() != _FIELDS:
            raise ValueError(f"an offset has the fields {', '.join(sorted(_FIELDS))}, v is 1")
        entity, generation, positions = given["entity"], given["generation"], given["p"]
        if not (isinstance(entity, str) and isinstance(generation, str) and entity):
            raise ValueError("entity and generation of an offset are text")
        if not isinstance(positions, dict) or not positions:
            raise ValueError("p of an offset has a position for each partition")
        return cls(entity, generation, dict(map(_position, positions.items())))

    def json(self) -> dict[str, object]:
        """Return the offset as Spark gets it."""
        return {
            "v": VERSION,
            "entity": self.entity,
            "generation": self.generation,
            "p": {str(number): position for number, position in sorted(self.positions.items())},
        }

    def at(self, positions: Mapping[int, int]) -> Offset:
        """Return the offset with other positions."""
        return replace(self, positions=dict(positions))


def read_offset(given: object) -> Offset:
    """Return an offset of a checkpoint. Raises `InvalidOffset`."""
    try:
        return Offset.of(given)
    except ValueError as error:
        raise InvalidOffset(
            f"the checkpoint has an offset that cannot be read ({error}): it is of another source,"
            " or damaged. Use the checkpoint of this query, or start with an empty one."
        ) from None


def check_offset(offset: Offset, current: Offset) -> None:
    """Raise an error if an offset is not for the entity, its life and partitions of `current`."""
    if offset.entity.lower() != current.entity.lower():
        raise InvalidOffset(
            f"the offset is of {offset.entity}, and the query reads {current.entity}: use the"
            " checkpoint of this query, or start with an empty one."
        )
    if offset.generation != current.generation:
        raise EntityRecreated(
            f"{current.entity} is not the entity that the offset is of: it was deleted and created"
            " again, or the bus is another one"
        )
    if offset.positions.keys() != current.positions.keys():
        raise InvalidOffset(
            f"the offset has positions of the partitions {sorted(offset.positions)}, and"
            f" {current.entity} has the partitions {sorted(current.positions)}: start with an empty"
            " checkpoint."
        )


_FIELDS: Final = {"v", "entity", "generation", "p"}


def _position(item: tuple[object, object]) -> tuple[int, int]:
    name, position = item
    if not isinstance(name, str) or not name.isascii() or not name.isdigit() or len(name) > 5:
        raise ValueError("a partition of an offset is a whole number")
    if type(position) is not int or not 0 <= position <= MAX_POSITION:
        raise ValueError(f"the position of partition {name} is a whole number")
    return int(name), position
