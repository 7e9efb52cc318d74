"""Entities and documents for tests of the XML of administration."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from postbus.broker.administration import (
    Availability,
    EntityDescription,
    RuleDescription,
    RuntimeInformation,
)
from postbus.contract.durations import MAX_DURATION_MS
from postbus.contract.entities import (
    CorrelationFilter,
    EntityKind,
    EntityProperties,
    EntityStatus,
    QueueProperties,
    RuleProperties,
    SqlAction,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.rule_values import Moment, Octets, Span
from postbus.edge.atom.descriptions import Place, Shown
from postbus.edge.atom.feeds import Feeds

PLACE = Place("https", "bus.example:5300")
ATOM = "http://www.w3.org/2005/Atom"
BUS = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
INSTANCE = "http://www.w3.org/2001/XMLSchema-instance"
COUNTS = RuntimeInformation(3, 2, 4, 5, 1, 4_096, 1_700_000_001_000, Availability.AVAILABLE, 7)


def described(
    properties: EntityProperties,
    name: str = "orders",
    rules: tuple[RuleDescription, ...] = (),
) -> EntityDescription:
    kinds = {
        QueueProperties: EntityKind.QUEUE,
        TopicProperties: EntityKind.TOPIC,
        SubscriptionProperties: EntityKind.SUBSCRIPTION,
    }
    kind = kinds[type(properties)]
    created_ms, updated_ms = 1_700_000_000_123, 1_700_000_000_999
    return EntityDescription(
        1, name, kind, properties, rules, 12, created_ms, updated_ms, False, (0,)
    )


def entry_of(properties: EntityProperties, name: str = "orders") -> bytes:
    """Return the answer to a GET."""
    shown = Shown(described(properties, name), COUNTS, PLACE)
    return Feeds(PLACE, "bus").entity(shown).encode()


def request_of(description: str, inside: str) -> bytes:
    """Return a body as clients send it."""
    return (
        f'<entry xmlns="{ATOM}"><content type="application/xml"><{description} xmlns="{BUS}"'
        f' xmlns:i="{INSTANCE}">{inside}</{description}></content></entry>'
    ).encode()


# --- made up --------------------------------------------------------------------------------------

XML_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
    | st.sampled_from("\t\r\n&<>\"']"),
    max_size=40,
)
NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,20}[A-Za-z0-9])?", fullmatch=True).filter(
    lambda name: "//" not in name
)
TIMES = st.integers(1_000, 10**12) | st.just(MAX_DURATION_MS)
SHARED = {
    "status": st.sampled_from(EntityStatus),
    "default_message_ttl_ms": TIMES,
    "enable_batched_operations": st.booleans(),
    "auto_delete_on_idle_ms": st.integers(300_000, 10**12) | st.just(MAX_DURATION_MS),
    "user_metadata": st.none() | XML_TEXT,
}
STORED = {
    "max_size_in_megabytes": st.integers(1024, 5_120),
    "max_message_size_in_kilobytes": st.integers(256, 102_400),
    "requires_duplicate_detection": st.booleans(),
    "duplicate_detection_history_time_window_ms": st.integers(20_000, 604_800_000),
    "enable_partitioning": st.booleans(),
}
RECEIVED = {
    "lock_duration_ms": st.integers(5_000, 300_000),
    "max_delivery_count": st.integers(1, 2_147_483_647),
    "dead_lettering_on_message_expiration": st.booleans(),
    "requires_session": st.booleans(),
    "forward_to": st.none() | NAMES,
    "forward_dead_lettered_messages_to": st.none() | NAMES,
}
QUEUES = st.builds(QueueProperties, **SHARED, **STORED, **RECEIVED)
TOPICS = st.builds(TopicProperties, **SHARED, **STORED, support_ordering=st.booleans())
SUBSCRIPTIONS = st.builds(
    SubscriptionProperties,
    **SHARED,
    **RECEIVED,
    dead_lettering_on_filter_evaluation_exceptions=st.booleans(),
)
ENTITIES = QUEUES | TOPICS | SUBSCRIPTIONS

VALUES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | XML_TEXT
    | st.builds(
        lambda at_ms: Moment(at_ms=at_ms), st.integers(-62_135_596_800_000, 253_402_300_799_999)
    )
    | st.builds(lambda ticks: Span(ticks=ticks), st.integers(-(2**63), 2**63 - 1))
    | st.builds(lambda octets: Octets(octets=octets), st.binary(max_size=20))
)
PAIRS = st.dictionaries(XML_TEXT, VALUES, max_size=3)
SQL_TEXT = XML_TEXT.filter(bool)
ASKED = ("content_type", "correlation_id", "message_id", "reply_to", "session_id", "to")


def sql_filter(text: str, parameters: dict[str, Any]) -> SqlFilter:
    return SqlFilter(sql_expression=text, parameters=parameters)


def sql_action(text: str, parameters: dict[str, Any]) -> SqlAction:
    return SqlAction(sql_expression=text, parameters=parameters)


FILTERS = st.one_of(
    st.fixed_dictionaries({"sql_filter": st.builds(sql_filter, SQL_TEXT, PAIRS)}),
    st.fixed_dictionaries(
        {
            "correlation_filter": st.builds(
                CorrelationFilter,
                label=XML_TEXT.filter(bool),
                **dict.fromkeys(
                    (
                        "content_type",
                        "correlation_id",
                        "message_id",
                        "reply_to",
                        "session_id",
                        "to",
                    ),
                    st.none() | XML_TEXT.filter(bool),
                ),
                properties=PAIRS,
            )
        }
    ),
)
RULES = st.builds(
    lambda name, filters, action: RuleProperties(name=name, action=action, **filters),
    st.from_regex(r"[A-Za-z0-9]{1,20}", fullmatch=True),
    FILTERS,
    st.none() | st.builds(sql_action, SQL_TEXT, PAIRS),
)
