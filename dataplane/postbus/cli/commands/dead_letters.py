"""`postbus dlq`: list, resend, edit and delete dead letters.

They are selected by number or by a filter. Each call handles a message completely or not at all, so
an interrupted run can be repeated: a message that was resent is gone from the dead-letter queue.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import BusAddress, ContextName, find_target
from postbus.cli.commands.messages import (
    Bodies,
    BodyContains,
    Count,
    Entity,
    FromNumber,
    Transfer,
    Where,
    print_refused,
    show_messages,
)
from postbus.cli.failures import (
    InputError,
    RefusedError,
    err,
    examples,
    expected_failures,
    out,
)
from postbus.cli.formats.output import (
    Format,
    OutputFormat,
    Yes,
    asks_yes,
    print_objects,
    write_line,
)

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient
    from postbus.cli.client.message_pages import Progress, Selection

LIST: Final = (
    "postbus dlq list orders",
    "postbus dlq list orders --where \"DeadLetterReason = 'bad'\" -o json",
    "postbus dlq list order-events/Subscriptions/large-orders --bodies",
)
SUMMARY: Final = (
    "postbus dlq summary orders",
    "postbus dlq summary orders --where \"region = 'eu'\" -o json",
)
RESEND: Final = (
    "postbus dlq resend orders 17 18              by number, to their original entity",
    "postbus dlq resend orders --all --dry-run    count them only",
    "postbus dlq resend orders --all --rate 100   at most 100 messages per second",
    "postbus dlq resend orders --where \"region = 'eu'\" --to orders-eu",
    "postbus dlq resend orders --numbers-file chosen.txt --rate 1000",
)
EDIT: Final = (
    "postbus dlq edit orders 17 --editor          edit its body in $EDITOR",
    "postbus dlq edit orders 17 --body fixed --property amount:int=7",
    "postbus dlq edit orders 17 --remove-property region --session '' --to repair",
)
DELETE: Final = (
    "postbus dlq delete orders 17",
    "postbus dlq delete orders --where \"DeadLetterReason = 'TTLExpiredException'\"",
)
EPILOG: Final = examples(SUMMARY[0], LIST[0], RESEND[0], RESEND[2], EDIT[1], DELETE[0])

dlq = typer.Typer(
    help="List, resend, edit and delete dead letters.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)
Numbers = Annotated[list[int] | None, typer.Argument(help="Sequence numbers.", metavar="NUMBER")]
All = Annotated[bool, typer.Option("--all", help="All current dead letters.")]
NumbersFile = Annotated[
    Path | None,
    typer.Option(
        "--numbers-file",
        metavar="FILE",
        help="A file with a sequence number on each line; - is the standard input.",
        allow_dash=True,
    ),
]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.01, help="Maximum number of messages per second.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Count the messages, change nothing.")]
To = Annotated[
    str | None, typer.Option("--to", help="Target queue or topic; default: the original entity.")
]
MaxResends = Annotated[
    int,
    typer.Option(
        "--max-resends",
        min=0,
        help="Leave messages that were resent so often and came back; 0: no limit.",
    ),
]
FIELDS: Final = {
    "--id": "messageId",
    "--session": "sessionId",
    "--subject": "subject",
    "--content-type": "contentType",
    "--correlation-id": "correlationId",
    "--reply-to": "replyTo",
}


@dlq.command("list", epilog=examples(*LIST))
def list_letters(
    entity: Entity,
    where: Where = None,
    body_contains: BodyContains = None,
    from_number: FromNumber = 0,
    count: Count = 20,
    transfer: Transfer = False,
    bodies: Bodies = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """List dead letters with their reasons; JSON output is one line per message."""
    with expected_failures():
        selection = _selection(entity, where, transfer, body_contains)
        is_transfer = selection.sub_queue == "transferDeadLetter"
        command = f"dlq list{' --transfer-dead-letter' if is_transfer else ''}"
        show_messages(
            find_target(context), selection, output, from_number, count, command, bodies=bodies
        )


@dlq.command("summary", epilog=examples(*SUMMARY))
def summarize(
    entity: Entity,
    where: Where = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Maximum number of groups; 0: no limit.")
    ] = 20,
    transfer: Transfer = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """Count dead letters by reason and description, largest group first.

    Numbers, ids and addresses in descriptions are replaced by *. Below the table is the command
    that resends each group.
    """
    from postbus.cli.client.control_client import run_with
    from postbus.cli.client.message_pages import counted
    from postbus.cli.commands.dead_letter_summary import COLUMNS, lines_of, summarized

    with expected_failures():
        selection = _selection(entity, where, transfer)

        async def work(control: ControlClient) -> list[dict[str, Any]]:
            found = await summarized(control, selection)
            await selection.look_for_topic(control)
            return found

        groups = run_with(find_target(context), work)
        shown = groups[:count] if count else groups
        print_objects(shown, output, COLUMNS, "no dead letters")
        if output.is_table and shown:
            letters = sum(each["count"] for each in groups)
            out.print(f"{counted(letters, 'dead letter')} in {counted(len(groups), 'group')}")
            if len(shown) < len(groups):
                out.print(f"showing the largest {len(shown)}; --count 0 shows all")
            for line in lines_of(shown):
                write_line(line)
        selection.warn()


@dlq.command(epilog=examples(*RESEND))
def resend(
    entity: Entity,
    numbers: Numbers = None,
    where: Where = None,
    body_contains: BodyContains = None,
    everything: All = False,
    numbers_file: NumbersFile = None,
    to: To = None,
    rate: Rate = None,
    max_resends: MaxResends = 10,
    transfer: Transfer = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    context: ContextName = None,
) -> None:
    """Resend dead letters; each is removed and sent in one step, never twice, never lost."""
    with expected_failures():
        selection = _selection(entity, where, transfer, body_contains)
        operation = _SelectedOperation(
            find_target(context),
            selection,
            "resent",
            numbers,
            everything=everything,
            numbers_file=numbers_file,
        )
        question = f"Resend {{}} dead letters of {entity}{f' to {to}' if to else ''}?"
        body: dict[str, Any] = {"to": to} if to else {}
        if max_resends:
            body["maxResends"] = max_resends
        operation.run("resend", body, question, rate, dry_run=dry_run, yes=yes)


@dlq.command(epilog=examples(*DELETE))
def delete(
    entity: Entity,
    numbers: Numbers = None,
    where: Where = None,
    body_contains: BodyContains = None,
    everything: All = False,
    numbers_file: NumbersFile = None,
    rate: Rate = None,
    transfer: Transfer = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    context: ContextName = None,
) -> None:
    """Delete dead letters."""
    with expected_failures():
        selection = _selection(entity, where, transfer, body_contains)
        operation = _SelectedOperation(
            find_target(context),
            selection,
            "deleted",
            numbers,
            everything=everything,
            numbers_file=numbers_file,
        )
        question = f"Delete {{}} dead letters of {entity}?"
        operation.run("delete", {}, question, rate, dry_run=dry_run, yes=yes)


@dlq.command(epilog=examples(*EDIT))
def edit(
    entity: Entity,
    number: Annotated[int, typer.Argument(help="Sequence number.")],
    body: Annotated[str | None, typer.Option("--body", help="New body.")] = None,
    body_file: Annotated[
        Path | None, typer.Option("--body-file", help="File with the new body; - is stdin.")
    ] = None,
    editor: Annotated[
        bool, typer.Option("--editor", "-e", help="Edit the body in $VISUAL or $EDITOR.")
    ] = False,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=TEXT", help="Also NAME:TYPE=VALUE."),
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove-property", help="Application property to remove.")
    ] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", help="New message id; '' removes it.")
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", help="New session id; '' removes it.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option("--subject", help="New subject; '' removes it.")
    ] = None,
    content_type: Annotated[
        str | None, typer.Option("--content-type", help="New content type; '' removes it.")
    ] = None,
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", help="New correlation id; '' removes it.")
    ] = None,
    reply_to: Annotated[
        str | None, typer.Option("--reply-to", help="New address for replies; '' removes it.")
    ] = None,
    to: To = None,
    transfer: Transfer = False,
    context: ContextName = None,
) -> None:
    """Resend one dead letter with changes; if they are rejected, nothing changes."""
    with expected_failures():
        given = (message_id, session, subject, content_type, correlation_id, reply_to)
        named = zip(FIELDS.values(), given, strict=True)
        changes: dict[str, Any] = {
            "properties": dict(map(_plain_property, properties or ())),
            "removedProperties": remove or [],
        }
        target = find_target(context)
        if sum((body is not None, body_file is not None, editor)) > 1:
            raise typer.BadParameter("use only one of --body, --body-file and --editor")
        content = _new_body(body, body_file)
        if editor:
            from postbus.cli.commands.body_editor import edited_body

            content = edited_body(target, _selection(entity, None, transfer), number)
        if content is not None:
            import base64

            changes["bodyBase64"] = base64.b64encode(content).decode("ascii")
        changes = {name: value for name, value in changes.items() if value not in ({}, [])}
        changes |= {name: value or None for name, value in named if value is not None}
        if not changes:
            raise typer.BadParameter("nothing to change: use --body, --property, --subject, …")
        selection = _selection(entity, None, transfer)
        operation = _SelectedOperation(target, selection, "resent", [number])
        request = {"edit": changes, **({"to": to} if to else {})}
        operation.run("resend", request, "", None, dry_run=False, yes=True)


# --- work ---------------------------------------------------------------------------------------


def read_numbers(file: Path) -> list[int]:
    """Return the sequence numbers of a file. Raises `InputError` with the line that has none."""
    found = []
    try:
        with nullcontext(sys.stdin) if str(file) == "-" else file.open(encoding="ascii") as lines:
            for at, line in enumerate(lines, 1):
                text = line.strip()
                if not text:
                    continue
                if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 2**63:
                    raise InputError(f"{file}, line {at}: no sequence number")
                found.append(int(text))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file} has no text: write a sequence number on each line") from None
    return found


class _SelectedOperation:
    """Selected messages and the operation on them."""

    def __init__(
        self,
        target: BusAddress,
        selected: Selection,
        verb: str,
        numbers: list[int] | None,
        *,
        everything: bool = False,
        numbers_file: Path | None = None,
    ) -> None:
        """Raise `typer.BadParameter` unless messages are selected in one way."""
        is_filtered = selected.where is not None or selected.body_contains is not None
        if sum([bool(numbers), is_filtered, everything, numbers_file is not None]) != 1:
            raise typer.BadParameter(
                "select messages by number, with --numbers-file, by --where or --body-contains, or"
                " with --all"
            )
        self._target = target
        self._selected = selected
        self._verb = verb
        self._is_named = bool(numbers)
        if numbers_file is not None:
            self._numbers: list[int] | None = list(dict.fromkeys(read_numbers(numbers_file)))
        else:
            self._numbers = list(dict.fromkeys(numbers)) if numbers else None

    def run(
        self,
        what: str,
        body: dict[str, Any],
        question: str,
        rate: float | None,
        *,
        dry_run: bool,
        yes: bool,
    ) -> None:
        """Find the messages, ask for confirmation, and handle them."""
        from postbus.cli.client.control_client import run_with
        from postbus.cli.client.message_pages import Progress, counted, numbers_of, summary

        numbers, is_named = self._numbers, self._is_named
        if numbers is None:
            numbers = run_with(self._target, lambda control: numbers_of(control, self._selected))
            self._selected.warn()
        if dry_run:
            out.print(f"{counted(len(numbers))} would be {self._verb}")
            return
        if not numbers:
            out.print("no messages")
            return
        if not is_named:
            asks_yes(question.format(len(numbers)), is_sure=yes)
        result = Progress()
        selection = numbers
        self._handle(what, body, selection, rate, result)
        out.print(summary(self._verb, result, len(numbers)), markup=False)
        if result.refused or (is_named and result.gone):
            print_refused(result.refused)
            raise typer.Exit(1)

    def _handle(
        self,
        what: str,
        body: dict[str, Any],
        numbers: list[int],
        rate: float | None,
        result: Progress,
    ) -> None:
        from postbus.cli.client.control_client import run_with
        from postbus.cli.client.message_pages import ask, handle_all, interrupted, summary
        from postbus.cli.formats.progress import progress_bar

        async def work(control: ControlClient) -> None:
            async def handle(some: Any) -> dict[str, Any]:
                selection = self._selected
                asked = {"entity": selection.entity, "subQueue": selection.sub_queue, **body}
                asked["numbers"] = list(some)
                return await ask(control, what, asked)

            with progress_bar(self._verb, len(numbers)) as bar:
                await handle_all(numbers, handle, bar, result, rate)

        try:
            run_with(self._target, work)
        except RefusedError as error:
            if len(numbers) == 1:
                raise
            raise interrupted(self._verb, result, len(numbers), error) from None
        except KeyboardInterrupt:
            text = summary(self._verb, result, len(numbers))
            err.print(f"{text}; run the command again to continue", markup=False)
            raise


def _selection(
    entity: str, where: str | None, is_transfer: bool, body_contains: str | None = None
) -> Selection:
    from postbus.cli.client.message_pages import Selection, split_path

    path = split_path(entity, is_dead=True, is_transfer=is_transfer)
    return Selection(*path, where, body_contains=body_contains)


def _plain_property(text: str) -> tuple[str, Any]:
    """Return a property that the API can set: text, number or boolean.

    Whole numbers become longs and others doubles; filters do not distinguish narrower types.
    """
    from postbus.cli.formats.message_json import read_property
    from postbus.message.codec import Char, Symbol, Timestamp

    name, value = read_property(text)
    if not isinstance(value, Timestamp | Char | Symbol):
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return name, plain(value)
    raise InputError(f"{name}: use text, a number or a boolean")


def _new_body(text: str | None, file: Path | None) -> bytes | None:
    if file is None:
        return None if text is None else text.encode()
    if str(file) == "-":
        return typer.get_binary_stream("stdin").read()
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None
