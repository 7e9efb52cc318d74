"""`postbus send`: sends text, lines or JSON to a queue or topic over AMQP.

A message counts as sent when the bus has confirmed it. After a failure the command prints the
number of sent messages, so that a script can continue after them.
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
from postbus.cli.client.contexts import BusAddress, ConnectionString, ContextName, find_target
from postbus.cli.commands.development import read_duration
from postbus.cli.completion import complete_entities
from postbus.cli.failures import InputError, RefusedError, err, examples, expected_failures, out
from postbus.cli.formats.progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from postbus.cli.client.amqp_session import Sender

WINDOW: Final = 500
"""Maximum number of unconfirmed messages; the bus groups concurrent ones in a commit."""

BUSY_S: Final = 30.0
"""Maximum time of retries of a message while the bus is busy, as in clients of Service Bus."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 3.0
ANSWER_S: Final = 30.0
"""Maximum wait for confirmations after a failure, to count the sent messages."""

EPILOG: Final = examples(
    "postbus send orders 'hello'",
    "echo hello | postbus send orders                   one message from standard input",
    "postbus send orders --file messages.jsonl          one message per line of JSON",
    "postbus send orders --file lines.txt --lines       one message per line of text",
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
    text: Annotated[str | None, typer.Argument(help="Body; default: standard input.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Messages as lines of JSON or a JSON array; - is stdin."),
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Send each line of the file as a message body.")
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
        str | None, typer.Option("--correlation-id", help="Correlation id.")
    ] = None,
    reply_to: Annotated[str | None, typer.Option("--reply-to", help="Address for replies.")] = None,
    time_to_live: Annotated[
        str | None,
        typer.Option(
            "--ttl",
            parser=read_duration,
            metavar="DURATION",
            help="Time to live, such as 90s, 5m, 2h.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", metavar="WHEN", help="Enqueue in 90s, 5m, 2h, or at a time with zone."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of times to send it.")] = 1,
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
    """Return an ISO 8601 time for a duration from now, such as `10m`, or for a time."""
    from datetime import UTC, datetime, timedelta

    from postbus.cli.formats.message_json import read_time, shown_time
    from postbus.contract.durations import parse_duration_ms

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
    """Yield the place of each message, for errors, and its JSON."""
    if text is not None and file is not None:
        raise typer.BadParameter("use either a text or --file, not both")
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
        raise InputError(f"{shown}: not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{shown}: {(error.strerror or 'cannot be read').lower()}") from None


def _of_array(text: str, shown: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        held = json.loads(text)
    except ValueError as error:
        raise InputError(f"{shown}: invalid JSON: {error}") from None
    for at, each in enumerate(held):
        if not isinstance(each, dict):
            raise InputError(f"{shown}[{at}]: a message is a JSON object")
        yield f"{shown}[{at}]", each


def _read_object(line: str, where: str) -> dict[str, Any]:
    try:
        held = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: invalid JSON: {error}; for lines of text add --lines") from None
    if not isinstance(held, dict):
        raise InputError(f"{where}: a message is a JSON object; for lines of text add --lines")
    return held


def _encoded(
    messages: Iterable[tuple[str, dict[str, Any]]], said: dict[str, Any], properties: list[str]
) -> Iterator[bytes]:
    """Yield the AMQP form of each message, with the options applied; raises `InputError`."""
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
    target: BusAddress, entity: str, payloads: Iterable[bytes], count: int | None
) -> int:
    """Send all messages in order and return their number.

    Raises `RefusedError` with the number of sent messages. `count`: expected number, for the
    progress bar.
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
                except InputError:  # messages before an invalid line get confirmed
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
            raise type(error)(f"{error}\n{run.failure_summary()}") from None
    return bar.done


class _Run:
    """Sent and unconfirmed messages of one run of the command, in order.

    A message that a busy bus refused had no effect. It is resent before anything new and in order,
    but after messages that were already in flight.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._on_way: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._has_gap = False

    async def send(self, sender: Sender, payload: bytes) -> None:
        """Send a message when the limit allows; raises `RefusedError`."""
        try:
            await self._begin(sender, payload)
            while len(self._on_way) >= WINDOW or (self._on_way and self._on_way[0][1].done()):
                await self._confirm_next(sender)
        except RefusedError:
            await self.count_behind()
            raise

    async def finish(self, sender: Sender) -> None:
        """Wait until no message is unconfirmed; raises `RefusedError`."""
        try:
            while self._on_way:
                await self._confirm_next(sender)
        except RefusedError:
            await self.count_behind()
            raise

    async def count_behind(self) -> None:
        """Count the confirmations of messages in flight, after a failure."""
        futures = [future for _, future in self._on_way]
        self._on_way.clear()
        if not futures:
            return
        answered, _ = await asyncio.wait(futures, timeout=ANSWER_S)
        stored = sum(not each.cancelled() and each.exception() is None for each in answered)
        self._has_gap |= stored > 0
        self._bar.advance(stored)

    def were_sent(self) -> str:
        """Return a text with the number of sent messages."""
        done = self._bar.done
        return "1 message was sent" if done == 1 else f"{done} messages were sent"

    def failure_summary(self) -> str:
        """Return the number of sent messages as part of an error message."""
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
        """Resend a refused message and refused ones after it, until none is refused."""
        loop = asyncio.get_running_loop()
        deadline, backoff = loop.time() + BUSY_S, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        sender.session.print_late(f"{busy}: retrying for {BUSY_S:.0f} s")
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
        """Wait for all unconfirmed messages; return those that a busy bus refused."""
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
