"""Names of entities on a bus, and their paths in the control API."""

from __future__ import annotations

from typing import Literal, NamedTuple
from urllib.parse import quote

from postbus.contract.entities import subscription_name, topic_of

EntityWord = Literal["queue", "topic", "subscription"]


class EntityPath(NamedTuple):
    """An entity of a bus; `name` of a subscription is its path."""

    kind: EntityWord
    name: str

    @property
    def url(self) -> str:
        """The path of the control API."""
        if self.kind == "subscription":
            topic, name = topic_of(self.name), subscription_name(self.name)
            return f"/v1/topics/{quote(topic, safe='')}/subscriptions/{quote(name, safe='')}"
        return f"/v1/{self.kind}s/{quote(self.name, safe='')}"
