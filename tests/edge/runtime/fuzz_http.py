"""Fuzzes messages over HTTP: `python -m tests.edge.runtime.fuzz_http SECONDS [SEED]`.

Damages addresses, headers, BrokerProperties, batches and messages of AMQP clients. For any input,
only a refusal with a text may come out; an accepted message can be shown and sent again unchanged;
and no message makes a header that breaks an answer.
"""

from __future__ import annotations

import json
import math
import random
import re

from postbus.edge.runtime.answers import body_of, headers_of, location_path
from postbus.edge.runtime.messages import BadMessage, batch_message, batch_of, single_message
from postbus.edge.runtime.requests import MAX_TIMEOUT_S, Action, target_of
from postbus.edge.web.authorization import HttpRefused
from postbus.entity.commands import Delivery
from postbus.message.codec import DecodeError
from postbus.message.envelope import Envelope
from postbus.message.fields import MessageFields
from postbus.message.sections import slice_message
from tests.fuzz_bounds import fuzz_program
from tests.message import fuzz_message
from tests.text_damages import damaged

CLEAN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")
METHODS = ("POST", "DELETE", "PUT", "GET", "")

ADDRESSES = [
    "/orders/messages?timeout=60&api-version=2013-08",
    "/a/b-c.d_e/messages/head?timeout=0",
    "/news/Subscriptions/all/$DeadLetterQueue/messages/head",
    "/orders/messages/id%201%2F2/0f8fad5b-d9cb-469f-a165-70867728950e",
    "http://here:5300/orders/%24DeadLetterQueue/MESSAGES/7/{0f8fad5bd9cb469fa16570867728950e}/",
]
BROKER = [
    '{"MessageId": "m", "Label": "l", "TimeToLive": 90.5, "To": "t", "State": "Active"}',
    '{"SessionId": "s", "PartitionKey": "s", "ReplyToSessionId": "r", "ViaPartitionKey": "v"}',
    '{"ScheduledEnqueueTimeUtc": "Sun, 06 Nov 2044 08:49:37 GMT", "CorrelationId": "c"}',
    '{"ScheduledEnqueueTimeUtc": "2044-11-06T08:49:37.5+01:00"}',
    '{"TimeToLiveTimeSpan": "1.02:03:04"}',
    '{"TimeToLive": "00:00:10", "ContentType": "text/plain", "ReplyTo": null}',
]
CUSTOM = [
    '"text"', '"say \\"hi\\""', "12345,ABC", "-7", "2147483648", "18446744073709551616", "1.5e3",
    "true", "False", '"Tue, 01 Jan 2030 00:00:00 GMT"', "nan", '"', "wörd €",
]  # fmt: skip
MORE = [
    '{"two words": "x", "n": 1, "big": 99999999999999999999, "half": 0.5, "no": null, "y": true}',
    '{"Host": "h", "host": "i", "when": "Tue, 01 Jan 2030 00:00:00 GMT", "": "", "\\u0000": "\\n"}',
]
BATCHES = [
    '[{"Body": "one"}, {"Body": "two", "BrokerProperties": {"Label": "l", "TimeToLive": 5}}]',
    '[{"Body": "", "UserProperties": {"a": 1, "b": "x", "c": true, "d": null, "e": 1.5}}]',
]
TOKENS = [
    *'{}[]",:\\/%?&#.=- \t\n\r\0',
    *('""', "null", "true", "NaN", "-1", "1e999", "9" * 40, "[" * 3_000, '{"a":' * 200),
    *("%2F", "%00", "%FF", "%", "//", "/messages", "/head", "$DeadLetterQueue", "?timeout="),
    *("\\u0000", "\\ud800", "\ud800", "é", "\U0001f600", "GMT", "00:00:01", "x" * 130),
    *('"SessionId":', '"TimeToLive":', '"MessageId":', '"Body":', '"UserProperties":'),
]


def mutated(pool: list[str], source: random.Random) -> str:
    """Return a text with up to four damages."""
    text = source.choice(pool)
    for _ in range(source.randint(0, 4)):
        at = source.randrange(len(text) + 1)
        if source.randrange(5):
            text = damaged(text, at, pool, TOKENS, source)
        else:
            text = text[:at] + chr(source.choice((9, 34, 44, 92, 127, 255, 0x20AC))) + text[at:]
    return text


def expect_text(refusal: str, source: object) -> None:
    """Check that a refusal has a text of one line."""
    assert refusal, source
    assert "\n" not in refusal, source


def check_address(source: random.Random) -> bool:
    text = mutated(ADDRESSES, source)
    try:
        target = target_of(source.choice(METHODS), text)
    except HttpRefused as refused:
        expect_text(refused.text, text)
        return False
    assert target.path.isprintable(), text
    assert 0 <= target.timeout_s <= MAX_TIMEOUT_S, text
    is_lock = target.action in (Action.COMPLETE, Action.UNLOCK, Action.RENEW)
    assert len(target.lock_token) == (16 if is_lock else 0), text
    return True


def check_message(source: random.Random) -> bool:
    """Send a message, show it and send the shown message again."""
    headers = [("BrokerProperties", mutated(BROKER, source))]
    if source.random() < 0.3:
        headers.append(("Postbus-Properties", mutated(MORE, source)))
    headers += [(f"p{n}", mutated(CUSTOM, source)) for n in range(source.randint(0, 3))]
    try:
        envelope = single_message(headers, source.choice((None, "text/plain", "é")), b"body")
    except BadMessage as error:
        expect_text(str(error), headers)
        return False
    check_shown(envelope)
    shown = headers_of(delivery_of(envelope), is_locked=True)
    again = single_message(shown.items(), shown["Content-Type"], body_of(envelope))
    before, after = MessageFields(envelope).application, MessageFields(again).application
    if not any(isinstance(each, float) and math.isinf(each) for each in before.values()):
        assert after == before, headers
        assert {name: type(each) for name, each in after.items()} == {
            name: type(each) for name, each in before.items()
        }, headers
    assert again.message_id == envelope.message_id, headers
    assert again.session_id == envelope.session_id, headers
    return True


def check_batch(source: random.Random) -> bool:
    text = mutated(BATCHES, source)
    try:
        data = text.encode(errors=source.choice(("surrogatepass", "replace")))
        for index, member in enumerate(batch_of(data)):
            check_shown(batch_message(index, member))
    except BadMessage as error:
        expect_text(str(error), text)
        return False
    return True


def check_foreign(source: random.Random) -> bool:
    """Show a message sent over AMQP."""
    try:
        envelope = slice_message(fuzz_message.mutated(FOREIGN, source))
    except DecodeError:
        return False
    check_shown(envelope)
    return True


FOREIGN = fuzz_message.load_corpus()


def delivery_of(envelope: Envelope) -> Delivery:
    return Delivery(bytes(16), 0, 7, 0, 0, None, envelope)


def check_shown(envelope: Envelope) -> None:
    """Check that no header breaks an answer."""
    delivery = delivery_of(envelope)
    for name, value in headers_of(delivery, is_locked=True).items():
        assert CLEAN.fullmatch(value), (name, value)
        assert name.isascii(), name
        value.encode()
    assert json.loads(headers_of(delivery, is_locked=False)["BrokerProperties"])
    at = location_path("orders", delivery)
    assert target_of("DELETE", at).lock_token == bytes(16), at
    assert isinstance(body_of(envelope), bytes)


CHECKS = (check_address, check_message, check_batch, check_foreign)


if __name__ == "__main__":
    fuzz_program(CHECKS)
