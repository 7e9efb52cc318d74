"""Fuzzes the XML of administration: `python -m tests.edge.atom.fuzz_atom SECONDS [SEED]`.

Damages bodies of clients, by bytes and by elements. For any body, reading may only raise
`BadDocument`, nothing may take long, and a result is written as a document that reads back
unchanged.
"""

from __future__ import annotations

import random
import re
import sys
import time

from postbus.broker.administration import RuleDescription
from postbus.contract.entities import (
    LIMITS,
    CorrelationFilter,
    EntityProperties,
    QueueProperties,
    RuleProperties,
    Sku,
    SqlAction,
    SqlFilter,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.edge.atom.descriptions import DESCRIPTIONS, read_description
from postbus.edge.atom.feeds import Feeds
from postbus.edge.atom.rules import read_rule
from postbus.edge.atom.xml_text import BadDocument, description_of, read_document
from tests.edge.atom.atom_documents import BUS, INSTANCE, PLACE, described, entry_of, request_of
from tests.fuzz_bounds import Bounds, program_arguments

SLOW_SECONDS = 1.0
SCHEMA = "http://www.w3.org/2001/XMLSchema"
SUBSCRIPTION = described(SubscriptionProperties(), "t/Subscriptions/s")


def written_rule(rule: RuleProperties) -> bytes:
    return Feeds(PLACE, "bus").rule(SUBSCRIPTION, RuleDescription(rule, 5)).encode()


POOL = [
    entry_of(QueueProperties(forward_to="a/b", user_metadata="x & <y>", requires_session=True)),
    entry_of(TopicProperties(enable_partitioning=True)),
    entry_of(SubscriptionProperties(forward_dead_lettered_messages_to="dead"), "t/Subscriptions/s"),
    written_rule(
        RuleProperties(
            name="r",
            sql_filter=SqlFilter(sql_expression="a = @b", parameters={"@b": 5, "c": True}),
            action=SqlAction(sql_expression="SET a = 1"),
        )
    ),
    written_rule(
        RuleProperties(
            name="$Default",
            correlation_filter=CorrelationFilter(
                label="l", properties={"i": 1, "l": 2**40, "d": 0.5, "b": False, "s": ""}
            ),
        )
    ),
    request_of(
        "SubscriptionDescription",
        "<DefaultRuleDescription><Filter i:type='TrueFilter'/><Name>n</Name>"
        "</DefaultRuleDescription><LockDuration>PT5M</LockDuration>",
    ),
    request_of(
        "QueueDescription",
        "<AuthorizationRules><AuthorizationRule i:type='SharedAccessAuthorizationRule'><Rights>"
        "<AccessRights>Send</AccessRights></Rights><KeyName>k</KeyName><PrimaryKey>p</PrimaryKey>"
        "</AuthorizationRule></AuthorizationRules>",
    ),
]
TOKENS = [
    *(b"<", b">", b"/", b"&", b";", b'"', b"'", b"=", b" ", b"\0", b"\r", b"\xff", b"]]>", b"-->"),
    *(b"&#13;", b"&#0;", b"&amp;", b"&x;", b"<!--", b"<![CDATA[", b"<?x ?>", b"<!DOCTYPE a>"),
    *(b" i:nil='true'", b" i:type='x:int'", b" xmlns=''", b" xmlns:i='urn:x'", b"<a/>", b"<a>"),
    *(f" xmlns:{prefix}='{uri}'".encode() for prefix in "id" for uri in (BUS, INSTANCE, SCHEMA)),
    *(b"PT5M", b"P1D", b"-1", b"1e9", b"true", b"2147483648", b"sb://h/a%2Fb", b"NaN", b"\xc2\x85"),
    *(each.encode() for each in ("é", "\U0001f600", "\ufffe")),
]


def mutated(source: random.Random) -> bytes:
    """Return a body with a few damages to its bytes or its elements."""
    body = source.choice(POOL)
    pieces = re.findall(rb"<[^>]*>|[^<]+", body)
    for _ in range(source.randint(0, 3)):
        at = source.randrange(len(pieces))
        match source.randrange(4):
            case 0 if len(pieces) > 1:
                del pieces[at]
            case 1:
                pieces.insert(at, source.choice(pieces))
            case 2:
                other = source.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case _:
                pieces[at : at + 1] = [pieces[at]] * source.choice((2, 50))
    body = b"".join(pieces)
    for _ in range(source.randint(0, 2)):
        at = source.randrange(len(body) + 1)
        token = source.choice(TOKENS)
        kept = at + source.choice((0, 0, 1, len(token)))
        body = body[:at] + token + body[kept:]
    return body


def try_body(body: bytes) -> EntityProperties | RuleProperties | None:
    """Read a body and its written form; None when it was refused."""
    try:
        name, description = description_of(read_document(body))
        if name not in DESCRIPTIONS:
            rule = read_rule(description)
            again = read_rule(description_of(read_document(written_rule(rule)))[1])
            assert again == rule, (again, rule)
            return rule
        found = read_description(DESCRIPTIONS[name], description, None, LIMITS[Sku.STANDARD])
    except BadDocument:
        return None
    element = description_of(read_document(entry_of(found.properties)))[1]
    same = read_description(DESCRIPTIONS[name], element, None, LIMITS[Sku.STANDARD])
    assert same.properties == found.properties, (same, found)
    return found.properties


def fuzz(
    seconds: float, seed: int, max_inputs: int | None = None, bounds: Bounds | None = None
) -> tuple[int, int]:
    """Return how many bodies were tried and how many of them were accepted."""
    bounds = bounds or Bounds()
    count = accepted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end and (max_inputs is None or count < max_inputs):
        body = mutated(random.Random(seed + count))
        began = time.process_time()
        try:
            with bounds.step():
                accepted += try_body(body) is not None
        except Exception:
            sys.stderr.write(f"failed: fuzz_atom.py 1 {seed + count}\n{body!r}\n")
            raise
        took = time.process_time() - began
        assert took < SLOW_SECONDS, f"{took:.1f} s: fuzz_atom.py 1 {seed + count}"
        count += 1
    return count, accepted


if __name__ == "__main__":
    seconds, seed = program_arguments()
    bounds = Bounds()
    count, accepted = fuzz(seconds, seed, bounds=bounds)
    sys.stdout.write(f"{count} bodies, {accepted} accepted, seed {seed}, {bounds}\n")
