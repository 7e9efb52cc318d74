"""Parser of AMQP addresses in the forms of all SDKs.

Entity names may contain slashes; known suffixes are taken from the right.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

MANAGEMENT_SUFFIX = "/$management"
DEAD_LETTER_SUFFIX = "/$deadletterqueue"
TRANSFER_SUFFIX = "/$transfer/$deadletterqueue"


class Node(Enum):
    """The kind of node that an address names."""

    ENTITY = "entity"
    MANAGEMENT = "management"
    CBS = "cbs"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """`path` keeps its case; for a management node it is the entity's path."""

    node: Node
    path: str

    @property
    def entity_path(self) -> str:
        """The path without its sub-queue."""
        lower = self.path.lower()
        for suffix in (TRANSFER_SUFFIX, DEAD_LETTER_SUFFIX):
            if lower.endswith(suffix):
                return self.path[: -len(suffix)]
        return self.path


def parse_address(address: str) -> NodeAddress:
    """Return the node of `name`, `/name`, `amqp://host/name`, `name/$management`, `$cbs`."""
    _, is_absolute, rest = address.partition("://")
    if is_absolute:
        _, _, address = rest.partition("/")
    path = unquote(address).strip("/")
    lower = path.lower()
    if lower == "$cbs":
        return NodeAddress(Node.CBS, path)
    if lower.endswith(MANAGEMENT_SUFFIX):
        return NodeAddress(Node.MANAGEMENT, path[: -len(MANAGEMENT_SUFFIX)])
    return NodeAddress(Node.ENTITY, path)
