"""XML of administration: a request's bytes become elements, values become text.

Knows nothing of entities. Input is hostile: document types and entities are refused, as are more
than `MAX_DEPTH` levels, and the caller limits the bytes. Output is text composed of `element`,
which escapes; so every answer is well-formed whatever a name or an expression contains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final
from xml.etree.ElementTree import Element, ParseError, TreeBuilder
from xml.sax.saxutils import escape, quoteattr

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from postbus.contract.durations import MAX_DURATION_MS

ATOM_NAMESPACE: Final = "http://www.w3.org/2005/Atom"
BUS_NAMESPACE: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS_NAMESPACE: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE_NAMESPACE: Final = "http://www.w3.org/2001/XMLSchema-instance"
SCHEMA_NAMESPACE: Final = "http://www.w3.org/2001/XMLSchema"

MAX_BODY_BYTES: Final = 1 << 20
"""Our choice: a correlation filter with thousands of properties fits."""

MAX_DEPTH: Final = 32
"""Our choice; no SDK nests deeper than nine levels."""

ENTRY: Final = "application/atom+xml;type=entry;charset=utf-8"
FEED: Final = "application/atom+xml;type=feed;charset=utf-8"

_TYPE: Final = f"{{{INSTANCE_NAMESPACE}}}type"
_NIL: Final = f"{{{INSTANCE_NAMESPACE}}}nil"
_BUS: Final = f"{{{BUS_NAMESPACE}}}"


class BadDocument(ValueError):
    """A body is not the description of an entity; the text says what to change."""


# --- reading ------------------------------------------------------------------------------------


class _Builder(TreeBuilder):
    """Builds elements and resolves the prefix of `xsi:type`, which a plain tree would lose.

    The attribute is `{namespace}name` afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._scopes: dict[str, list[str]] = {}  # prefix -> namespace, the innermost last
        self._depth = 0

    def start_ns(self, prefix: str | None, uri: str | None) -> None:
        self._scopes.setdefault(prefix or "", []).append(uri or "")

    def end_ns(self, prefix: str | None) -> None:
        self._scopes[prefix or ""].pop()

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadDocument(f"the elements are nested more than {MAX_DEPTH} levels deep")
        if _TYPE in attrs:
            attrs[_TYPE] = self._resolved(attrs[_TYPE].strip())
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)

    def _resolved(self, name: str) -> str:
        prefix, _, local = name.rpartition(":")
        known = self._scopes.get(prefix)
        if known:
            return f"{{{known[-1]}}}{local}"
        if prefix:
            raise BadDocument(f"the prefix of the type {name} is not declared")
        return f"{{}}{local}"


def read_document(body: bytes) -> Element:
    """Return the root of a body. Raises `BadDocument` for all other bytes."""
    parser = DefusedXMLParser(target=_Builder(), forbid_dtd=True)
    try:
        parser.feed(body)
        root: Element = parser.close()
    except BadDocument:
        raise
    except DefusedXmlException:
        raise BadDocument("the body has a document type or entities; leave them out") from None
    except ParseError as error:
        raise BadDocument(f"the body is not well-formed XML: {error}") from None
    except (ValueError, LookupError, AssertionError) as error:  # an unknown encoding
        raise BadDocument(f"the body cannot be read as XML: {error}") from None
    return root


def description_of(root: Element) -> tuple[str, Element]:
    """Return kind and element of an entry's description, `QueueDescription` for instance."""
    content = root.find(f"{{{ATOM_NAMESPACE}}}content")
    if root.tag != f"{{{ATOM_NAMESPACE}}}entry" or content is None:
        raise BadDocument(
            f"the body is not an Atom entry: expected <entry xmlns={ATOM_NAMESPACE!r}>"
            " with <content>"
        )
    for child in content:
        if child.tag.startswith(_BUS):
            return child.tag[len(_BUS) :], child
    raise BadDocument(
        f"the entry has no description: <content> holds a description of xmlns={BUS_NAMESPACE!r}"
    )


def children(parent: Element) -> Iterator[tuple[str, Element]]:
    """Yield name and element of each child, without other vocabularies and `xsi:nil`."""
    for child in parent:
        if child.tag.startswith(_BUS) and child.get(_NIL, "").strip() not in ("true", "1"):
            yield child.tag[len(_BUS) :], child


def text_of(element: Element) -> str:
    """Return the text of an element without children."""
    if len(element):
        raise BadDocument(f"{_local(element.tag)}: expected text, found elements")
    return element.text or ""


def type_of(element: Element) -> tuple[str, str]:
    """Return namespace and name of an element's `xsi:type`, empty without one."""
    uri, _, name = element.get(_TYPE, "{}").rpartition("}")
    return uri[1:], name


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


# --- values -------------------------------------------------------------------------------------

_DURATION: Final = re.compile(
    r"P(?:(\d{1,9})D)?(?:T(?:(\d{1,12})H)?(?:(\d{1,13})M)?(?:(\d{1,15}(?:\.\d{1,15})?)S)?)?",
    re.ASCII,
)


def read_duration_ms(text: str) -> int:
    """Return milliseconds of an ISO 8601 duration in days or less.

    Durations within a millisecond of .NET's longest mean "never": clients round that value.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()) or text.strip().endswith("T"):
        raise ValueError("use an ISO 8601 duration such as PT30S, PT5M or P14D")
    days, hours, minutes, seconds = match.groups(default="0")
    whole_ms = (int(days) * 86_400 + int(hours) * 3_600 + int(minutes) * 60) * 1_000
    total_ms = whole_ms + round(float(seconds) * 1_000)
    return MAX_DURATION_MS if total_ms >= MAX_DURATION_MS - 1 else total_ms


def read_boolean(text: str) -> bool:
    """Return true or false as XML and the SDKs write them."""
    match text.strip().lower():
        case "true" | "1":
            return True
        case "false" | "0":
            return False
        case _:
            raise ValueError("use true or false")


def read_integer(text: str) -> int:
    """Return a whole number of 64 bits."""
    try:
        value = int(text.strip()) if text.strip().isascii() and "_" not in text else None
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise ValueError("use a whole number")
    return value


def write_boolean(value: bool) -> str:
    return "true" if value else "false"


def write_time(value_ms: int) -> str:
    """Return a time in RFC 3339 with milliseconds, which every SDK can read."""
    return (
        datetime.fromtimestamp(value_ms / 1_000, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


# --- writing ------------------------------------------------------------------------------------

_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CARRIAGE_RETURN: Final = {"\r": "&#13;"}


def written(text: str) -> str:
    """Return text as content of an element; characters outside XML become U+FFFD."""
    if text.isascii() and text.isprintable():
        return escape(text) if "&" in text or "<" in text or ">" in text else text
    return escape(_NO_XML.sub("�", text), _CARRIAGE_RETURN)


def quoted(text: str) -> str:
    """Return text as the value of an attribute, with its quotes."""
    return quoteattr(_NO_XML.sub("�", text), _CARRIAGE_RETURN)


def element(name: str, text: str, attributes: str = "") -> str:
    """Return an element with text; `attributes` are already escaped, with a leading space."""
    return f"<{name}{attributes}>{written(text)}</{name}>"
