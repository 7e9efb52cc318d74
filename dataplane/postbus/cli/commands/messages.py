"""`postbus peek` and `postbus purge`: show messages, and delete those that a filter selects."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import BusAddress, ContextName, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import err, examples, expected_failures, out
from postbus.cli.formats.output import (
    Format,
    OutputFormat,
    Yes,
    as_json,
    asks_yes,
    print_objects,
    printable_lines,
    write_line,
)

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient
    from postbus.cli.client.message_pages import Selection

PEEK_EPILOG: Final = examples(
    "postbus peek orders                          the first 20 messages, without locking them",
    "postbus peek orders --from 1000 --count 0    all from a sequence number on",
    "postbus peek orders --dead-letter --bodies",
    "postbus peek orders --where \"amount > 100 AND region = 'eu'\"",
    "postbus peek orders --where \"sys.Label = 'placed'\" -o json",
    "postbus peek orders --state scheduled",
)
PURGE_EPILOG: Final = examples(
    "postbus purge orders --dry-run               count them only",
    "postbus purge orders                         all; asks for confirmation",
    "postbus purge orders --where \"region = 'eu'\" --yes",
    "postbus purge orders --dead-letter --yes",
)
BODY_BYTES: Final = 1 << 20
SHOWN_BYTES: Final = 200
COLUMNS: Final = {
    "sequenceNumber": "number",
    "enqueuedTime": "enqueued",
    "messageId": "id",
    "sessionId": "session",
    "subject": "subject",
    "deliveryCount": "deliveries",
    "body": "body",
}
DEAD_COLUMNS: Final = {
    "sequenceNumber": "number",
    "deadLetteredTime": "died",
    "messageId": "id",
    "deadLetterDeliveries": "deliveries",
    "deadLetterReason": "reason",
    "deadLetterDescription": "description",
    "body": "body",
}


_OPTIONS: Final = {
    "main": "",
    "deadLetter": " --dead-letter",
    "transferDeadLetter": " --transfer-dead-letter",
}


class State(StrEnum):
    """States of messages."""

    ACTIVE = "active"
    DEFERRED = "deferred"
    SCHEDULED = "scheduled"


Where = Annotated[
    str | None,
    typer.Option("--where", "-w", metavar="SQL", help="SQL filter, as in rules."),
]
BodyContains = Annotated[
    str | None,
    typer.Option(
        "--body-contains", metavar="TEXT", help="Only messages with this text in the body."
    ),
]
Dead = Annotated[bool, typer.Option("--dead-letter", "-d", help="Use the dead-letter queue.")]
Transfer = Annotated[
    bool, typer.Option("--transfer-dead-letter", help="Use the transfer dead-letter queue.")
]
Session = Annotated[
    str | None, typer.Option("--session", "-s", help="Only messages of this session.")
]
FromNumber = Annotated[int, typer.Option("--from", min=0, help="Start at this sequence number.")]
Count = Annotated[
    int, typer.Option("--count", "-n", min=0, help="Maximum number of messages; 0: no limit.")
]
Bodies = Annotated[bool, typer.Option("--bodies", help="Show full bodies, up to 1 MiB.")]
InState = Annotated[State | None, typer.Option("--state", help="Only messages in this state.")]
Entity = Annotated[
    str,
    typer.Argument(help="Queue, or topic/Subscriptions/name.", autocompletion=complete_entities),
]


def peek(
    entity: Entity,
    from_number: FromNumber = 0,
    count: Count = 20,
    dead: Dead = False,
    transfer: Transfer = False,
    where: Where = None,
    body_contains: BodyContains = None,
    session: Session = None,
    state: InState = None,
    bodies: Bodies = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """Show messages without locking or changing them; JSON output is one line per message."""
    from postbus.cli.client.message_pages import Selection, split_path

    with expected_failures():
        entity, part = split_path(entity, is_dead=dead, is_transfer=transfer)
        selection = Selection(
            entity, part, where, session, state.value if state else None, body_contains
        )
        command = f"peek{_OPTIONS[part]}"
        show_messages(
            find_target(context), selection, output, from_number, count, command, bodies=bodies
        )


def show_messages(
    target: BusAddress,
    selection: Selection,
    output: Format,
    from_number: int,
    count: int,
    command: str,
    *,
    bodies: bool,
) -> None:
    """Print selected messages as they come; `command` would show more of them."""
    from postbus.cli.client.control_client import run_with
    from postbus.cli.client.message_pages import peeked

    body_bytes = BODY_BYTES if bodies or not output.is_table else SHOWN_BYTES
    rows: list[dict[str, Any]] = []

    async def work(control: ControlClient) -> None:
        async for each in peeked(
            control, selection, from_number=from_number, most=count, body_bytes=body_bytes
        ):
            if output is Format.JSON:
                write_line(as_json(each))
            else:
                rows.append(each)

        await selection.look_for_topic(control)

    run_with(target, work)
    if output is not Format.JSON:
        _print_messages(rows, output, is_dead=selection.sub_queue != "main", bodies=bodies)
    if output.is_table:
        selection.print_more(len(rows), command)
    selection.warn()


def _print_messages(
    rows: list[dict[str, Any]], output: Format, *, is_dead: bool, bodies: bool
) -> None:
    """Print messages as a table or YAML; full bodies are below their row."""
    columns = dict(DEAD_COLUMNS if is_dead else COLUMNS)
    if bodies and output.is_table:
        del columns["body"]
        for each in rows:
            print_objects([each], output, columns)
            out.print(printable_lines(each.get("body", each.get("bodyBase64", ""))), markup=False)
        if rows:
            return
    shown = [{**each, "body": each.get("body", each.get("bodyBase64"))} for each in rows]
    print_objects(shown if output.is_table else rows, output, columns, "no messages")


def purge(
    entity: Entity,
    dead: Dead = False,
    transfer: Transfer = False,
    where: Where = None,
    body_contains: BodyContains = None,
    session: Session = None,
    state: InState = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the messages, delete none.")
    ] = False,
    yes: Yes = False,
    context: ContextName = None,
) -> None:
    """Delete all messages, or those that a filter selects, except locked ones."""
    from postbus.cli.client.control_client import run_with
    from postbus.cli.client.message_pages import Selection, counted, purge_page, split_path
    from postbus.cli.formats.progress import progress_bar

    entity, part = split_path(entity, is_dead=dead, is_transfer=transfer)
    selection = Selection(
        entity, part, where, session, state.value if state else None, body_contains
    )
    what = "message" if part == "main" else "dead letter"
    refused: dict[int, str] = {}

    async def run(control: ControlClient, *, is_dry: bool, total: int | None) -> int:
        found = number = 0
        with progress_bar("counting" if is_dry else "deleting", total) as bar:
            while True:
                page = await purge_page(control, selection, number, dry_run=is_dry)
                count = int(page["matched"] if is_dry else page["deleted"])
                found += count
                bar.advance(count)
                refused.update({int(one["number"]): one["detail"] for one in page["refused"]})
                number = page["nextNumber"]
                if page["isEnd"]:
                    return found

    with expected_failures():
        target = find_target(context)
        total = None
        if dry_run or not yes:
            total = run_with(target, lambda control: run(control, is_dry=True, total=None))
        if dry_run:
            out.print(f"{counted(total or 0, what)} of {entity} would be deleted", markup=False)
            selection.warn()
            return
        if not yes:
            if not total:
                out.print("no messages")
                return
            asks_yes(f"Delete {counted(total, what)} of {entity}?", is_sure=False)
        done = run_with(target, lambda control: run(control, is_dry=False, total=total))
        out.print(f"deleted {counted(done, what)} of {entity}", markup=False)
        selection.warn()
        if refused:
            print_refused(refused)
            raise typer.Exit(1)


def print_refused(refused: dict[int, str], most: int = 10) -> None:
    """Print which messages were refused, the first few of many."""
    for number in sorted(refused)[:most]:
        err.print(f"{number}: {refused[number]}", markup=False)
    if len(refused) > most:
        err.print(f"and {len(refused) - most} more")
