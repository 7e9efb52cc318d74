"""Atom around descriptions: entries, feeds and the links by which clients page.

JavaScript's client takes names from the path of `id`, hence `/Subscriptions/` and `/Rules/` in
exactly this case; Python's takes the next page from the second of exactly two links.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from urllib.parse import quote

from postbus.broker.administration import EntityDescription, RuleDescription
from postbus.contract.entities import EntityKind, NamespaceProperties, Sku, topic_of
from postbus.edge.atom.descriptions import Place, Shown, write_description
from postbus.edge.atom.rules import write_rule
from postbus.edge.atom.xml_text import (
    ATOM_NAMESPACE,
    BUS_NAMESPACE,
    INSTANCE_NAMESPACE,
    element,
    quoted,
    write_time,
)

ELEMENTS: Final = {
    EntityKind.QUEUE: "QueueDescription",
    EntityKind.TOPIC: "TopicDescription",
    EntityKind.SUBSCRIPTION: "SubscriptionDescription",
}
DEFAULT_VERSION: Final = "2021-05"


class Feeds:
    """Writes the answers to one request, for the client's address and API version."""

    def __init__(self, place: Place, namespace: str, api_version: str = DEFAULT_VERSION) -> None:
        self._place = place
        self._namespace = namespace
        self._version = quote(api_version, safe="-")

    # --- entries --------------------------------------------------------------------------------

    def entity(self, shown: Shown) -> str:
        """Return the entry of a queue, topic or subscription."""
        description = shown.description
        return self._entry(
            path=description.name,
            title=leaf_of(description),
            times_ms=(description.created_ms, description.updated_ms),
            name=ELEMENTS[description.kind],
            description=write_description(shown),
        )

    def rule(self, subscription: EntityDescription, rule: RuleDescription) -> str:
        """Return the entry of a subscription's rule."""
        name = rule.properties.name
        return self._entry(
            path=f"{subscription.name}/Rules/{name}",
            title=name,
            times_ms=(rule.created_ms, rule.created_ms),
            name="RuleDescription",
            description=write_rule(rule.properties, write_time(rule.created_ms)),
        )

    def namespace(self, properties: NamespaceProperties, created_ms: int) -> str:
        """Return the entry of the namespace."""
        sku = properties.sku.name
        units = f"<MessagingUnits>{properties.sku.capacity or 1}</MessagingUnits>"
        return self._entry(
            path="$namespaceinfo",
            title=self._namespace,
            times_ms=(created_ms, created_ms),
            name="NamespaceInfo",
            description=(
                f"<CreatedTime>{write_time(created_ms)}</CreatedTime>"
                f"<MessagingSKU>{sku.value}</MessagingSKU>"
                f"{units if sku is Sku.PREMIUM else ''}"
                f"<ModifiedTime>{write_time(created_ms)}</ModifiedTime>"
                f"{element('Name', self._namespace)}<NamespaceType>Messaging</NamespaceType>"
            ),
        )

    def _entry(
        self, path: str, title: str, times_ms: tuple[int, int], name: str, description: str
    ) -> str:
        url = self._url(path)
        created_ms, updated_ms = times_ms
        return (
            f'<entry xmlns="{ATOM_NAMESPACE}">{element("id", url)}'
            f"{element('title', title, _PLAIN)}"
            f"<published>{write_time(created_ms)}</published>"
            f"<updated>{write_time(updated_ms)}</updated>"
            f"<author>{element('name', self._namespace)}</author>"
            f'<link rel="self" href={quoted(url)}/>'
            f'<content type="application/xml">'
            f'<{name} xmlns="{BUS_NAMESPACE}" xmlns:i="{INSTANCE_NAMESPACE}">'
            f"{description}</{name}></content></entry>"
        )

    # --- feeds ----------------------------------------------------------------------------------

    def feed(
        self, path: str, title: str, entries: Sequence[str], now_ms: int, following: str | None
    ) -> str:
        """Return a page; `following` is the query of the next one, None for the last page."""
        url = self._url(path)
        link = ""
        if following is not None:
            link = f'<link rel="next" href={quoted(f"{url}&{following}")}/>'
        return (
            f'<feed xmlns="{ATOM_NAMESPACE}">{element("title", title, _PLAIN)}{element("id", url)}'
            f"<updated>{write_time(now_ms)}</updated>"
            f'<link rel="self" href={quoted(url)}/>{link}{"".join(entries)}</feed>'
        )

    def _url(self, path: str) -> str:
        base = f"{self._place.scheme}://{self._place.authority}/{quote(path, safe=_SAFE)}"
        return f"{base}?api-version={self._version}"


_PLAIN: Final = ' type="text"'
_SAFE: Final = "/$~"

NOTHING: Final = (
    f'<feed xmlns="{ATOM_NAMESPACE}"><title type="text">Publicly Listed Services</title>'
    '<subtitle type="text">This is the list of publicly-listed services currently available.'
    "</subtitle><id>uuid:27fcd1e2-3a99-44b1-8f1e-3e92b52f0171;id=30</id>"
    "<updated>{updated}</updated><generator>Service Bus 1.1</generator></feed>"
)


def nothing(now_ms: int) -> str:
    """Return Service Bus's answer for a missing queue or topic; clients recognise it."""
    now = datetime.fromtimestamp(now_ms / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return NOTHING.format(updated=now)


def leaf_of(description: EntityDescription) -> str:
    """Return the name in clients' terms: of a subscription the last part of its path."""
    if description.kind is EntityKind.SUBSCRIPTION:
        return description.name[len(topic_of(description.name)) + len("/Subscriptions/") :]
    return description.name
