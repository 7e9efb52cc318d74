"""`postbus send`: text, lines or JSON to a queue or topic over AMQP.

A message counts as sent when the bus has confirmed it. After a failure the command says how many
those are, so that a script can go on where it stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.broker.backoff import Backoff
from postbus.cli.client.contexts import ConnectionString, ContextName, Target, find_target
from postbus.cli.commands.development import read_duration
from postbus.cli.completion import complete_entities
from postbus.cli.failures import InputError, RefusedError, err, examples, expected_failures, out
from postbus.cli.formats.progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from postbus.cli.client.amqp_session import Sender

WINDOW: Final = 500
"""Messages on the way at a time; the bus groups what comes together in one commit."""

BUSY_S: Final = 30.0
"""How long a message that the bus is too busy for is sent again: what clients of Service Bus do."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 3.0
ANSWER_S: Final = 30.0
"""How long to wait for answers that only count what was sent."""

EPILOG: Final = examples(
    "postbus send orders 'hello'",
    "echo hello | postbus send orders                   one message of standard input",
    "postbus send orders --file messages.jsonl          a message for each line of JSON",
    "postbus send orders --file lines.txt --lines       a message for each line of text",
    "postbus send orders hi --property region=eu --property amount:int=7",
    "postbus send orders hi --session customer-7 --id order-1 --subject placed",
    "postbus send orders later --schedule 10m           also 2030-01-31T12:00:00Z",
    "postbus send orders load --repeat 10000",
    "postbus send order-events hi --context prod",
)


def send(
    entity: Annotated[
        str, typer.Argument(help="Queue or topic.", autocompletion=complete_entities)
    ],
    text: Annotated[
        str | None, typer.Argument(help="Body; without it and --file, standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Lines of JSON, a message each, or a JSON array; - is stdin."
        ),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of the file is the body of a message.")
    ] = False,
    properties: Annotated[
        list[str] | None,
        typer.Option(
            "--property", "-p", metavar="NAME=TEXT", help="Also NAME:TYPE=VALUE: int, bool, …"
        ),
    ] = None,
    session: Annotated[str | None, typer.Option("--session", "-s", help="Session id.")] = None,
    message_id: Annotated[str | None, typer.Option("--id", help="Message id.")] = None,
    subject: Annotated[str | None, typer.Option("--subject", help="Subject (label).")] = None,
    content_type: Annotated[
        str | None, typer.Option("--content-type", help="Such as application/json.")
    ] = None,
    correlation_id: Annotated[
        str | None, typer.Option("--correlation-id", help="Id of what it belongs to.")
    ] = None,
    reply_to: Annotated[str | None, typer.Option("--reply-to", help="Where answers go.")] = None,
    time_to_live: Annotated[
        str | None,
        typer.Option(
            "--ttl", parser=read_duration, metavar="DURATION", help="It expires after 90s, 5m, 2h."
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="WHEN", help="In 90s, 5m, 2h, or at a time with zone."),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Send it so many times.")] = 1,
    connection_string: ConnectionString = None,
    context: ContextName = None,
) -> None:
    """Send messages to a queue or topic."""
    with expected_failures():
        given = {
            "sessionId": session,
            "messageId": message_id,
            "subject": subject,
            "contentType": content_type,
            "correlationId": correlation_id,
            "replyTo": reply_to,
            "timeToLive": time_to_live,
            "scheduledEnqueueTime": None if schedule is None else _read_schedule(schedule),
        }
        said = {name: value for name, value in given.items() if value is not None}
        messages = _read_messages(text, file, is_lines=lines)
        payloads = _encoded(messages, said, properties or [])
        target = find_target(context, connection_string=connection_string)
        count: int | None = 1 if file is None else None
        if repeat > 1:
            held = list(payloads)
            payloads = itertools.chain.from_iterable(itertools.repeat(held, repeat))
            count = len(held) * repeat
        sent = asyncio.run(_send_all(target, entity, payloads, count))
        out.print(f"sent {sent} message{'s' * (sent != 1)} to {entity}", markup=False)


def _read_schedule(text: str) -> str:
    """Return a time in ISO 8601 of `10m` from now or of a time."""
    from datetime import UTC, datetime, timedelta

    from postbus.cli.formats.message_json import read_time, shown_time
    from postbus.contract.entities import parse_duration_ms

    try:
        delay_ms = parse_duration_ms(read_duration(text))
    except typer.BadParameter:
        return shown_time(read_time(text))
    when = datetime.now(UTC) + timedelta(milliseconds=delay_ms)
    return shown_time(int(when.timestamp() * 1_000))


# --- reading ------------------------------------------------------------------------------------


def _read_messages(
    text: str | None, file: Path | None, *, is_lines: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where a message stands and what it says."""
    if text is not None and file is not None:
        raise typer.BadParameter("give a text or --file, not both")
    if is_lines and file is None:
        raise typer.BadParameter("--lines needs --file")
    if file is not None:
        return _read_file(file, is_lines=is_lines)
    if text is None:
        if sys.stdin.isatty():
            err.print("reading the body from standard input until Ctrl-D")
        return iter([("standard input", _body_of(sys.stdin.buffer.read()))])
    return iter([("the text", {"body": text})])


def _body_of(content: bytes) -> dict[str, Any]:
    import base64

    try:
        return {"body": content.decode().removesuffix("\n")}
    except UnicodeDecodeError:
        return {"bodyBase64": base64.b64encode(content).decode("ascii")}


def _read_file(path: Path, *, is_lines: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    shown = "standard input" if str(path) == "-" else str(path)
    try:
        stream = sys.stdin if str(path) == "-" else path.open(encoding="utf-8")
        with stream:
            first = True
            for number, line in enumerate(stream, 1):
                where = f"{shown}:{number}"
                if is_lines:
                    yield where, {"body": line.removesuffix("\n").removesuffix("\r")}
                elif first and line.lstrip().startswith("["):
                    yield from _of_array(line + stream.read(), shown)
                elif line.strip():
                    first = False
                    yield where, _read_object(line, where)
    except UnicodeDecodeError:
        raise InputError(f"{shown}: is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{shown}: {(error.strerror or 'cannot be read').lower()}") from None


def _of_array(text: str, shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise InputError(f"{shown}: no valid JSON: {error}") from None
    for at, each in enumerate(held):
        if not isinstance(each, dict):
            raise InputError(f"{shown}[{at}]: a message is a JSON object")
        yield f"{shown}[{at}]", each


def _read_object(line: str, where: str) -> dict[str, Any]:
    try:
        held = json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{where}: no valid JSON: {error}; for lines of text add --lines"
        ) from None
    if not isinstance(held, dict):
        raise InputError(f"{where}: a message is a JSON object; for lines of text add --lines")
    return held


def _encoded(
    messages: Iterable[tuple[str, dict[str, Any]]], said: dict[str, Any], properties: list[str]
) -> Iterator[bytes]:
    """Yield the AMQP form of each message with what the options say; raises `InputError`."""
    from time import time_ns

    from postbus.cli.formats.message_json import encode_json_message, read_property, shown_value

    added = {name: shown_value(value) for name, value in map(read_property, properties)}

    def encode(where: str, message: dict[str, Any]) -> bytes:
        application = message.get("applicationProperties") or {}
        if not isinstance(application, dict):
            raise InputError(f"{where}: applicationProperties: must be an object")
        whole = {**message, **said}
        if added or application:
            whole["applicationProperties"] = {**application, **added}
        try:
            return encode_json_message(whole, time_ns() // 1_000_000)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    return (encode(where, message) for where, message in messages)


# --- sending ------------------------------------------------------------------------------------


async def _send_all(
    target: Target, entity: str, payloads: Iterable[bytes], count: int | None
) -> int:
    """Send everything in order; return how many, raises `RefusedError` that says how many were.

    `count`: how many are expected, for the progress bar.
    """
    from postbus.cli.client.amqp_session import connected
    from postbus.cli.client.connection_strings import read_connection_string

    endpoint = read_connection_string(target.connection_string())
    title = None if count is not None and count < WINDOW else "sending"
    with progress_bar(title, count) as bar:
        run = _Run(bar)
        try:
            async with connected(endpoint, entity, target.context.ca_file) as session:
                sender = await session.sender(entity)
                try:
                    for payload in payloads:
                        await run.send(sender, payload)
                except InputError:  # what was sent before a wrong line is confirmed
                    await run.finish(sender)
                    raise
                except asyncio.CancelledError:
                    await run.count_behind()
                    raise
                await run.finish(sender)
        except asyncio.CancelledError:
            if count != 1 and bar.done:
                err.print(f"[red]postbus:[/red] {run.were_sent()}")
            raise
        except (RefusedError, InputError) as error:
            if count == 1 or not bar.done:
                raise
            raise type(error)(f"{error}\n{run.told()}") from None
    return bar.done


class _Run:
    """What one run of the command has sent, and what is on the way, in its order.

    What the bus is too busy for had no effect, so it is sent again, before anything new and in its
    order, but behind what was on the way with it.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._on_way: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._has_gap = False

    async def send(self, sender: Sender, payload: bytes) -> None:
        """Send a message when there is room; raises `RefusedError`."""
        try:
            await self._begin(sender, payload)
            while len(self._on_way) >= WINDOW or (self._on_way and self._on_way[0][1].done()):
                await self._confirm_next(sender)
        except RefusedError:
            await self.count_behind()
            raise

    async def finish(self, sender: Sender) -> None:
        """Wait until nothing is on the way; raises `RefusedError`."""
        try:
            while self._on_way:
                await self._confirm_next(sender)
        except RefusedError:
            await self.count_behind()
            raise

    async def count_behind(self) -> None:
        """Look what became of what is on the way, where that is all that is wanted."""
        futures = [future for _, future in self._on_way]
        self._on_way.clear()
        if not futures:
            return
        answered, _ = await asyncio.wait(futures, timeout=ANSWER_S)
        stored = sum(not each.cancelled() and each.exception() is None for each in answered)
        self._has_gap |= stored > 0
        self._bar.advance(stored)

    def were_sent(self) -> str:
        """Return how many messages the bus has."""
        done = self._bar.done
        return "1 message was sent" if done == 1 else f"{done} messages were sent"

    def told(self) -> str:
        """Return how many the bus has, for whoever reads why not all."""
        return (
            f"{self.were_sent()}{', some of them behind it' if self._has_gap else ' before that'}"
        )

    async def _begin(self, sender: Sender, payload: bytes) -> None:
        self._on_way.append((payload, await sender.begin(payload)))

    async def _confirm_next(self, sender: Sender) -> None:
        from postbus.cli.client.amqp_session import BusyError

        payload, future = self._on_way.popleft()
        try:
            await sender.confirmed(future)
            self._bar.advance()
        except BusyError as error:
            await self._send_again(sender, payload, error)
        except asyncio.CancelledError:
            self._on_way.appendleft((payload, future))
            raise

    async def _send_again(self, sender: Sender, payload: bytes, busy: RefusedError) -> None:
        """Send a refused message, and those behind it that are refused too, until none is."""
        loop = asyncio.get_running_loop()
        deadline, backoff = loop.time() + BUSY_S, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        sender.session.print_late(f"{busy}: trying again for {BUSY_S:.0f} s")
        refused = [payload, *await self._refused(sender)]
        self._has_gap = True
        while refused:
            if loop.time() > deadline:
                raise busy
            await backoff.pause()
            for payload in refused:
                await self._begin(sender, payload)
            refused = await self._refused(sender)
        self._has_gap = False

    async def _refused(self, sender: Sender) -> list[bytes]:
        """Wait for all that is on the way; return what the bus is too busy for."""
        from postbus.cli.client.amqp_session import BusyError

        refused = []
        while self._on_way:
            payload, future = self._on_way.popleft()
            try:
                await sender.confirmed(future)
                self._bar.advance()
            except BusyError:
                refused.append(payload)
        return refused
