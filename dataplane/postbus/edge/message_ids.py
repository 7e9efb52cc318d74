"""Ids for messages that come without one.

Service Bus assigns them, and clients rely on it: @azure/service-bus cannot settle a received
message without an id. Called by all protocols that accept messages.
"""

from __future__ import annotations

import secrets
from itertools import count, islice
from typing import Final

from postbus.message.envelope import Envelope
from postbus.message.patch import give_message_id
from postbus.message.runs import name_usual_messages

_OF_THIS_PROCESS: Final = b"\xa1\x20" + secrets.token_hex(8).encode()  # a text of 32 bytes
_NUMBERS: Final = count(1)
_SECTION: Final = b"\x00\x53\x73\xc0\x23\x01"
"""First octets of properties that hold only a text of 32 bytes: a list of one."""

_SECTION_BYTES: Final = len(_SECTION) + 34


def name_messages(envelopes: list[Envelope]) -> None:
    """Give an id of 32 hexadecimal digits to each message without one."""
    done = name_usual_messages(envelopes, _OF_THIS_PROCESS, _SECTION, _NUMBERS)
    for envelope in islice(envelopes, done, None):
        if envelope.message_id is None:
            message_id = _OF_THIS_PROCESS + b"%016x" % next(_NUMBERS)
            if envelope.properties:
                give_message_id(envelope, message_id)
            else:  # many programs send only a body, and each step counts here
                envelope.message_id = message_id
                envelope.properties = _SECTION + message_id
                envelope.size_bytes += _SECTION_BYTES
