"""`postbus dlq summary`: groups of dead letters by cause, added up over all pages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from postbus.cli.client.message_pages import ask
from postbus.cli.formats.message_json import read_time, shown_time
from postbus.cli.formats.output import printable

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient
    from postbus.cli.client.message_pages import Selection

COLUMNS: Final = {
    "count": "count",
    "reason": "reason",
    "description": "description",
    "first": "first",
    "last": "last",
    "exampleNumber": "example",
}
MAX_FILTER: Final = 1_024
SPECIAL: Final = frozenset('"$`\\!')
"""Characters that are special to a shell in double quotes, including bash history expansion."""

TIMES: Final = {"first": "firstAt", "last": "lastAt"}


async def summarized(control: ControlClient, selection: Selection) -> list[dict[str, Any]]:
    """Return all groups, largest first, in the form for output."""
    groups: dict[tuple[str | None, str | None], dict[str, Any]] = {}
    number = 0
    while True:
        page = await ask(control, "summary", selection.summary_body(number))
        selection.note(page)
        for each in page["groups"]:
            known = groups.setdefault((each["reason"], each["description"]), each)
            if known is not each:
                _add(known, each)
        number = page["nextNumber"]
        if page["isEnd"]:
            break
    found = sorted(groups.values(), key=lambda group: -group["count"])
    return [_shown(each, selection) for each in found]


def _add(known: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add a group of a later page to a known one."""
    known["count"] += other["count"]
    for key, choose in (("firstAt", min), ("lastAt", max)):
        times = [each[key] for each in (known, other) if each[key] is not None]
        known[key] = choose(times, key=read_time) if times else None


def _shown(group: Mapping[str, Any], selection: Selection) -> dict[str, Any]:
    answer: dict[str, Any] = {name: group[name] for name in ("count", "reason", "description")}
    for name, key in TIMES.items():
        answer[name] = None if group[key] is None else shown_time(read_time(group[key]))
    answer |= {
        name: group[name] for name in ("exampleNumber", "exampleMessageId", "exampleDescription")
    }
    answer["resend"] = resend_command(selection, group)
    return answer


def resend_command(selection: Selection, group: Mapping[str, Any]) -> str:
    """Return the command that resends the dead letters of a group."""
    where = filter_of(group)
    if selection.where is not None and len(selection.where) + len(where) + 12 <= MAX_FILTER:
        where = f"({selection.where}) AND {where}"
    option = " --transfer-dead-letter" if selection.sub_queue == "transferDeadLetter" else ""
    return f"postbus dlq resend {shlex.quote(selection.entity)}{option} --where {_typed(where)}"


def _typed(text: str) -> str:
    """Return text quoted for a shell, in double quotes, since filters are full of single quotes."""
    return shlex.quote(text) if any(each in SPECIAL for each in text) else f'"{text}"'


def filter_of(group: Mapping[str, Any]) -> str:
    """Return the filter that selects a group; left-out words match anything."""
    return (
        f"{_condition('DeadLetterReason', group['reason'])} AND "
        f"{_like('DeadLetterErrorDescription', group['description'], is_cut=group['isCut'])}"
    )


def _condition(name: str, text: str | None) -> str:
    return f"{name} IS NULL" if text is None else f"{name} = {_quoted(text)}"


def _like(name: str, text: str | None, *, is_cut: bool) -> str:
    if text is None or ("*" not in text and not is_cut and text.isprintable()):
        return _condition(name, text)
    pattern = "".join(map(_as_pattern, text)) + ("%" if is_cut else "")
    end = " ESCAPE '~'" if "~" in pattern else ""
    return f"{name} LIKE {_quoted(pattern)}{end}"


def _as_pattern(character: str) -> str:
    if character == "*":
        return "%"
    if not character.isprintable():  # could not be copied from a terminal
        return "_"
    return f"~{character}" if character in "~%_" else character


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def lines_of(groups: list[dict[str, Any]]) -> list[str]:
    """Return the commands that resend groups, for people."""
    return [printable(each["resend"]) for each in groups]
