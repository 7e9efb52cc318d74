"""Commands and the replies that they expect; the rig compares each reply with its command."""

from __future__ import annotations

from typing import get_args

from postbus.entity.commands import (
    Command,
    Refused,
    Reply,
)
from postbus.entity.expects import Expects
from tests.entity.partition_rig import REPLY_TO


def test_what_can_be_submitted_is_handled_as_a_command() -> None:
    assert {kind.__name__ for kind in Expects.__subclasses__()} == {
        kind.__name__ for kind in get_args(Command)
    }


def test_every_reply_belongs_to_a_command() -> None:
    assert {Refused, *REPLY_TO.values()} == set(get_args(Reply))
