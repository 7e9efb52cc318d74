"""The mark of whose an entity or a rule is: a text that the bus keeps with each definition.

`postbus.dev/<plural>/<namespace>/<name>/<uid>` of the resource. The bus does not interpret it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from postbus_operator.crds import GROUP, KINDS
from postbus_operator.objects import Key, Resource

_PLURALS: Final = {kind.name: kind.plural for kind in KINDS}
_KINDS: Final = {kind.plural: kind.name for kind in KINDS}


class Mark(NamedTuple):
    """A resource as a mark names it; another one may have its key today."""

    key: Key
    uid: str


def mark_of(resource: Resource) -> str:
    """Return the mark of what belongs to a resource."""
    key = resource.key
    return f"{GROUP}/{_PLURALS[key.kind]}/{key.namespace}/{key.name}/{resource.uid}"


def read_mark(text: str) -> Mark | None:
    """Return the resource that a mark names; None: it is none of an operator."""
    parts = text.split("/")
    if len(parts) != 5 or parts[0] != GROUP or parts[1] not in _KINDS:
        return None
    return Mark(Key(_KINDS[parts[1]], parts[2], parts[3]), parts[4])
