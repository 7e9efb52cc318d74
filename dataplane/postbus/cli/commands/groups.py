"""`postbus groups`: reader groups, the cursors of pipelines."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import examples, expected_failures, out
from postbus.cli.formats.output import Format, OutputFormat, print_objects

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

EPILOG: Final = examples(
    "postbus groups list                        who reads, and how far",
    "postbus groups create orders lake          keep messages from now on until lake has read them",
    "postbus groups create orders lake --from earliest",
    "postbus groups create orders failures --dead-letters",
    "postbus groups create orders pricing --drain   instead of receivers, which are refused",
    "postbus groups create orders lake --max-pinned-bytes 10737418240",
    "postbus groups create orders lake --max-pinned-age P7D --on-pin-limit drop",
    "postbus groups reset orders lake --from 2026-01-31T08:00:00Z",
    "postbus groups drop orders lake            delete it, and what only it kept",
)
COLUMNS: Final = {
    "entity": "entity",
    "subQueue": "sub-queue",
    "name": "group",
    "kind": "kind",
    "unreadMessages": "unread, at most",
    "lagSeconds": "lag, s",
    "keptBytes": "kept bytes",
    "isOverLimit": "over limit",
    "planNumber": "plan",
    "isSettled": "settled",
    "attempts": "attempts",
    "epoch": "epoch",
    "reader": "reader",
}
PATH: Final = "/v1/reader-groups"

groups = typer.Typer(
    help="List, create, reset and delete reader groups, the cursors of data pipelines.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)
Entity = Annotated[
    str,
    typer.Argument(help="Queue, or TOPIC/Subscriptions/NAME.", autocompletion=complete_entities),
]
Name = Annotated[str, typer.Argument(help="Group: lower-case letters, digits, . _ and -.")]
DeadLetters = Annotated[
    bool, typer.Option("--dead-letters", help="Of the dead-letter queue of the entity.")
]


class OnPinLimit(StrEnum):
    """Reaction to a limit of a group."""

    FAIL = "fail"
    DROP = "drop"


START: Final = "earliest, latest, or a time such as 2026-01-31T08:00:00Z."


@groups.command("list", epilog=EPILOG)
def list_groups(output: OutputFormat = Format.TABLE, context: ContextName = None) -> None:
    """List all reader groups."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> dict[str, Any]:
        answer: dict[str, Any] = await control.get(PATH)
        return answer

    with expected_failures():
        found = run_with(find_target(context), work)
        print_objects(found["items"], output, COLUMNS, "no reader groups")
        if away := found["unavailablePartitions"]:
            names = ", ".join(map(str, away))
            out.print(f"groups of the unavailable partitions {names} are missing", markup=False)


@groups.command(epilog=EPILOG)
def create(
    entity: Entity,
    name: Name,
    start: Annotated[
        str | None,
        typer.Option("--from", help=f"Begin: {START} Else latest, and earliest with --drain."),
    ] = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Read instead of receivers, which are refused meanwhile."),
    ] = False,
    dead_letters: DeadLetters = False,
    max_pinned_bytes: Annotated[
        int | None,
        typer.Option(
            help="Limit of what the group keeps after receivers have settled it, in bytes."
        ),
    ] = None,
    max_pinned_age: Annotated[
        str | None,
        typer.Option(help="Limit of the time since such a message was settled, for example P7D."),
    ] = None,
    on_pin_limit: Annotated[
        OnPinLimit | None,
        typer.Option(
            help="Beyond a limit: fail shows the group and deletes nothing (the default); drop"
            " deletes the oldest messages, and the reader is refused until a reset."
        ),
    ] = None,
    context: ContextName = None,
) -> None:
    """Create a reader group; an existing one stays where it is, and gets the limits given here."""
    body = _of(entity, name, dead_letters=dead_letters) | {
        "start": start,
        "kind": "drain" if drain else "tap",
    }
    limits = {
        "maxPinnedBytes": max_pinned_bytes,
        "maxPinnedAge": max_pinned_age,
        "onPinLimit": on_pin_limit,
    }
    body |= {field: value for field, value in limits.items() if value is not None}
    done = _change("create", body, context)
    out.print(f"{done['entity']}: the reader group {name} is at plan {done['planNumber']}",
              markup=False)  # fmt: skip


@groups.command(epilog=EPILOG)
def reset(
    entity: Entity,
    name: Name,
    start: Annotated[str, typer.Option("--from", help=f"Go on from: {START}")],
    dead_letters: DeadLetters = False,
    context: ContextName = None,
) -> None:
    """Let a reader group go on elsewhere; its reader is refused from then on."""
    body = _of(entity, name, dead_letters=dead_letters) | {"start": start}
    done = _change("reset", body, context)
    out.print(f"{done['entity']}: the reader group {name} goes on from there; start its reader"
              " again", markup=False)  # fmt: skip


@groups.command(epilog=EPILOG)
def drop(
    entity: Entity,
    name: Name,
    dead_letters: DeadLetters = False,
    context: ContextName = None,
) -> None:
    """Delete a reader group, and the messages that only it kept."""
    done = _change("delete", _of(entity, name, dead_letters=dead_letters), context)
    out.print(f"{done['entity']}: the reader group {name} is deleted", markup=False)


def _of(entity: str, name: str, *, dead_letters: bool) -> dict[str, object]:
    return {
        "entity": entity,
        "name": name,
        "subQueue": "deadLetter" if dead_letters else "main",
    }


def _change(verb: str, body: dict[str, object], context: str | None) -> dict[str, Any]:
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> dict[str, Any]:
        answer: dict[str, Any] = await control.post(f"{PATH}/{verb}", body)
        return answer

    with expected_failures():
        return run_with(find_target(context), work)
