"""Messages that come without an id get one, the same bytes whichever way it is made."""

from __future__ import annotations

from postbus.edge.message_ids import name_messages
from postbus.message.codec import Described, Ulong, decode_value, encode_value
from postbus.message.patch import give_message_id
from postbus.message.sections import slice_message

BODY = encode_value(Described(Ulong(0x75), b"x" * 100))
"""Beyond the least that each message counts for."""
SUBJECT = encode_value(Described(Ulong(0x73), [None, None, None, "subject"]))
NAMED = encode_value(Described(Ulong(0x73), ["mine"]))


def test_each_message_without_an_id_gets_one_of_its_own() -> None:
    envelopes = [slice_message(raw + BODY) for raw in (b"", SUBJECT, NAMED, b"")]
    name_messages(envelopes)
    ids = [decode_value(envelope.message_id or b"")[0] for envelope in envelopes]
    assert ids[2] == "mine"
    assert len({*ids}) == 4
    assert all(len(each) == 32 for each in ids if each != "mine")
    for envelope in envelopes:
        again = slice_message(envelope.properties + envelope.body)
        assert (again.message_id, again.size_bytes) == (envelope.message_id, envelope.size_bytes)
    assert decode_value(envelopes[1].properties)[0].value[3] == "subject"


def test_the_short_way_makes_the_same_section() -> None:
    short, long = slice_message(BODY), slice_message(BODY)
    name_messages([short])
    assert short.message_id is not None
    give_message_id(long, short.message_id)
    assert (long.properties, long.size_bytes) == (short.properties, short.size_bytes)
