"""Ids of messages that come without one.

Service Bus gives them one, and clients rely on it: @azure/service-bus cannot settle a received
message without an id. All doors that take messages in call this.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from typing import Final

from postbus.message.envelope import Envelope
from postbus.message.patch import give_message_id

_OF_THIS_PROCESS: Final = b"\xa1\x20" + secrets.token_hex(8).encode()  # a text of 32 bytes
_NUMBERS: Final = itertools.count(1)


def name_messages(envelopes: Iterable[Envelope]) -> None:
    """Give an id of 32 hexadecimal digits to each message that has none."""
    for envelope in envelopes:
        if envelope.message_id is None:
            give_message_id(envelope, _OF_THIS_PROCESS + b"%016x" % next(_NUMBERS))
