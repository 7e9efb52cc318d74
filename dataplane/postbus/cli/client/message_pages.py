"""Message operations over the control API: in pages and chunks, at a limited rate.

A call of the API does a bounded part; the loops are here. A handled message is not found again by
its number, so every loop can be interrupted anywhere and restarted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape

from postbus.cli.client.control_client import ControlClient, NotFoundError, part
from postbus.cli.failures import InputError, RefusedError, err
from postbus.cli.formats.message_json import read_time, shown_time
from postbus.contract.control_messages import MAX_SEQUENCE_NUMBERS

if TYPE_CHECKING:
    from postbus.cli.formats.progress import ProgressBar

PACED_CHUNKS_A_SECOND: Final = 4
PASSING: Final = {"busy", "not-applied", "unknown"}
"""Temporary reasons: the partition is loading, or the result is unknown."""

NAMED: Final = 10
"""Maximum number of sequence numbers in a line of output."""

ATTEMPTS: Final = 20
RETRY_S: Final = 0.5
SUB_QUEUES: Final = {
    "/$transfer/$deadletterqueue": "transferDeadLetter",
    "/$deadletterqueue": "deadLetter",
}
"""Suffix of an entity's path for receivers, in lower case -> the API's name."""

PLAIN: Final = (
    "sequenceNumber",
    "messageId",
    "sessionId",
    "partitionKey",
    "subject",
    "contentType",
    "correlationId",
    "to",
    "replyTo",
    "replyToSessionId",
    "deliveryCount",
    "state",
    "enqueuedSequenceNumber",
    "deadLetterReason",
    "deadLetterDescription",
    "deadLetterSource",
    "deadLetterDeliveries",
    "deadLetterLink",
    "deadLetterClient",
    "timeToLive",
)
RENAMED: Final = {
    "enqueuedAt": "enqueuedTime",
    "deadLetteredAt": "deadLetteredTime",
    "scheduledAt": "scheduledEnqueueTime",
    "expiresAt": "expiresAt",
    "sizeInBytes": "sizeBytes",
}
"""The API's name of a field -> its name in the JSON of `receive` and `send`."""

TIMES: Final = ("enqueuedTime", "deadLetteredTime", "scheduledEnqueueTime", "expiresAt")


def split_path(entity: str, *, is_dead: bool = False, is_transfer: bool = False) -> tuple[str, str]:
    """Return an entity and the API's name of the sub-queue that a path or options select."""
    for suffix, word in SUB_QUEUES.items():
        if entity.lower().endswith(suffix):
            return entity[: -len(suffix)], word
    if is_transfer:
        return entity, "transferDeadLetter"
    return entity, "deadLetter" if is_dead else "main"


@dataclass(slots=True)
class Selection:
    """Messages of a queue or sub-queue that a filter selects."""

    entity: str
    sub_queue: str = "main"
    where: str | None = None
    session_id: str | None = None
    state: str | None = None
    body_contains: str | None = None
    failed: int = 0
    away: set[int] = field(default_factory=set)
    absent: set[str] | None = None
    total: int | None = None
    next_number: int | None = None
    is_topic: bool = False

    def body(self, **more: object) -> dict[str, object]:
        """Return the request for a page."""
        said = {
            "entity": self.entity,
            "subQueue": self.sub_queue,
            "where": self.where,
            "sessionId": self.session_id,
            "state": self.state,
            "bodyContains": self.body_contains,
            **more,
        }
        return {key: value for key, value in said.items() if value is not None}

    def summary_body(self, from_number: int) -> dict[str, object]:
        """Return the request for a page of a summary."""
        said = {"entity": self.entity, "subQueue": self.sub_queue, "where": self.where}
        body = {key: value for key, value in said.items() if value is not None}
        return {**body, "fromNumber": from_number}

    def note(self, page: dict[str, Any]) -> None:
        """Record what a page could not examine."""
        self.failed += int(page["failed"])
        self.away.update(page["away"])
        if page["lookedAt"]:
            found = set(page["absent"])
            self.absent = found if self.absent is None else self.absent & found
        self.total = page.get("total")
        self.next_number = None if page["isEnd"] else page["nextNumber"]

    def print_more(self, shown: int, command: str) -> None:
        """Print how many messages there are, and the command for the rest."""
        if self.next_number is None or (self.total is not None and shown >= self.total):
            return
        options = {"--where": self.where, "--body-contains": self.body_contains}
        if self.session_id is not None:
            options["--session"] = self.session_id
        if self.state is not None:
            options["--state"] = self.state
        said = "".join(f" {name} {quote(text)}" for name, text in options.items() if text)
        of = "" if self.total is None else f" of {counted(self.total, 'message')}"
        if said and self.total is not None:
            of = f"; {counted(self.total)} in total"
        err.print(
            f"{shown} shown{of}; continue with: postbus {command} {quote(self.entity)}{said}"
            f" --from {self.next_number}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    async def look_for_topic(self, control: ControlClient) -> None:
        """Note whether the entity is a topic, which has its messages in subscriptions."""
        with contextlib.suppress(RefusedError):
            self.is_topic = bool(await control.get(f"/v1/topics/{part(self.entity)}"))

    def warn(self) -> None:
        """Print what could not be examined."""
        if self.is_topic:
            err.print(
                f"[yellow]postbus:[/yellow] {escape(self.entity)} is a topic: its messages and dead"
                " letters are in its subscriptions, see postbus get subscriptions"
                f" {escape(self.entity)}"
            )
        if self.absent:
            names = ", ".join(sorted(self.absent))
            err.print(
                f"[yellow]postbus:[/yellow] no message has a property {escape(names)}: filters use"
                " properties, and fields as sys.Label, not the body; use --body-contains for it"
            )
        if self.failed:
            err.print(
                f"[yellow]postbus:[/yellow] the filter could not be evaluated for {self.failed}"
                " messages; they were not selected"
            )
        if self.away:
            named = ", ".join(map(str, sorted(self.away)))
            err.print(
                f"[yellow]postbus:[/yellow] partitions {named} did not answer; their messages"
                " are missing"
            )


async def peeked(
    control: ControlClient, selection: Selection, *, from_number: int, most: int, body_bytes: int
) -> AsyncIterator[dict[str, Any]]:
    """Yield messages by sequence number, as JSON of the command line. `most` 0: all."""
    left = most
    while True:
        asked = selection.body(
            fromNumber=from_number,
            count=min(left, MAX_SEQUENCE_NUMBERS) if most else MAX_SEQUENCE_NUMBERS,
            bodyBytes=body_bytes,
        )
        page = await ask(control, "peek", asked)
        selection.note(page)
        for each in page["messages"]:
            yield shown_message(each)
        left -= len(page["messages"])
        from_number = page["nextNumber"]
        if page["isEnd"] or (most and left <= 0):
            return


async def ask(control: ControlClient, what: str, body: dict[str, object]) -> dict[str, Any]:
    """Request messages; raises `RefusedError`, with the name of a missing entity.

    Raises `InputError` for an invalid filter, with the position.
    """
    try:
        answer: dict[str, Any] = await control.post(f"/v1/messages/{what}", body)
    except NotFoundError as error:
        if str(error) == body.get("to"):
            raise NotFoundError(
                f"no queue or topic {body['to']}: nothing was sent; see postbus get queues"
            ) from None
        raise NotFoundError(
            f"no queue or subscription {body['entity']}; the name of a subscription is"
            " topic/Subscriptions/name"
        ) from None
    except RefusedError:
        if "where" in body:
            _check_filter(str(body["where"]))
        raise
    return answer


def _check_filter(text: str) -> None:
    """Raise `InputError` when the filter is invalid."""
    from postbus.rules.expressions import refuse_unknown
    from postbus.rules.grammar import parse_filter, pointed
    from postbus.rules.nodes import RuleError

    try:
        refuse_unknown(parse_filter(text))
    except RuleError as error:
        raise InputError(f"--where: {pointed(str(error), text)}") from None


def shown_message(view: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the API in the JSON of the command line, as `send` takes it."""
    answer = {name: view[name] for name in PLAIN if view.get(name) is not None}
    answer |= {name: view[key] for key, name in RENAMED.items() if view.get(key) is not None}
    answer |= {name: shown_time(read_time(answer[name])) for name in TIMES if name in answer}
    if view.get("applicationProperties"):
        answer["applicationProperties"] = view["applicationProperties"]
    if view.get("bodyBase64") is not None:
        answer |= _body(view)
    if view.get("resends"):
        answer["resends"] = view["resends"]
    if view.get("isMalformed"):
        answer["isMalformed"] = True
    return answer


def _body(view: dict[str, Any]) -> dict[str, Any]:
    content = base64.b64decode(view["bodyBase64"])
    is_cut = int(view["bodyBytes"]) > len(content)
    try:
        return {"body": content.decode(errors="ignore" if is_cut else "strict")}
    except UnicodeDecodeError:
        return {"bodyBase64": view["bodyBase64"]}


# --- handling -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """Results so far."""

    done: int = 0
    forwarded: int = 0
    gone: list[int] = field(default_factory=list)
    """Numbers that were not found: already handled, here or by somebody else."""

    refused: dict[int, str] = field(default_factory=dict)


Handle = Callable[[Sequence[int]], Awaitable[dict[str, Any]]]


async def handle_all(
    numbers: Sequence[int], handle: Handle, bar: ProgressBar, result: Progress, rate: float | None
) -> None:
    """Handle messages in order, at most `rate` per second. Raises `RefusedError`.

    `result` is updated continuously, so that it is correct after an interruption.
    """
    size = MAX_SEQUENCE_NUMBERS
    if rate is not None:
        size = min(max(int(rate / PACED_CHUNKS_A_SECOND), 1), MAX_SEQUENCE_NUMBERS)
    loop = asyncio.get_running_loop()
    begun, handled = loop.time(), 0
    for at in range(0, len(numbers), size):
        chunk = numbers[at : at + size]
        await _handle_chunk(chunk, handle, result)
        bar.advance(len(chunk))
        handled += len(chunk)
        if rate is not None and handled < len(numbers):
            await asyncio.sleep(max(begun + handled / rate - loop.time(), 0))


async def _handle_chunk(chunk: Sequence[int], handle: Handle, result: Progress) -> None:
    """Handle a chunk; temporarily refused messages are retried."""
    for attempt in range(ATTEMPTS):
        answer = await handle(chunk)
        refused = {int(each["number"]): each for each in answer["refused"]}
        forwarded = answer.get("forwarded", ())
        result.forwarded += len(forwarded)
        result.done += len(answer["numbers" if "numbers" in answer else "resent"]) + len(forwarded)
        passing = [number for number, each in refused.items() if each["reason"] in PASSING]
        is_last = attempt == ATTEMPTS - 1
        for number, each in refused.items():
            if each["reason"] == "message-not-found":
                result.gone.append(number)
            elif number not in passing or is_last:
                result.refused[number] = each["detail"] or each["reason"]
        if not passing or is_last:
            return
        chunk = passing
        await asyncio.sleep(RETRY_S)


async def numbers_of(control: ControlClient, selection: Selection) -> list[int]:
    """Return the numbers of all currently selected messages, in order."""
    return [
        int(each["sequenceNumber"])
        async for each in peeked(control, selection, from_number=0, most=0, body_bytes=0)
    ]


async def purge_page(
    control: ControlClient, selection: Selection, from_number: int, *, dry_run: bool
) -> dict[str, Any]:
    """Delete, or count, the selected messages of one page."""
    body = selection.body(fromNumber=from_number, dryRun=dry_run)
    page = await ask(control, "purge", body)
    selection.note(page)
    return page


def summary(verb: str, result: Progress, total: int) -> str:
    """Return a summary of the results in one line."""
    text = f"{verb} {result.done} of {counted(total)}"
    text += f"; being forwarded: {result.forwarded}" if result.forwarded else ""
    if result.gone:
        named = ", ".join(map(str, result.gone[:NAMED]))
        more = ", …" if len(result.gone) > NAMED else ""
        text += f"; no longer there: {len(result.gone)} ({named}{more})"
    return text + (f"; refused: {len(result.refused)}" if result.refused else "")


def counted(count: int, what: str = "message") -> str:
    """Return a number with a noun, in the plural if needed."""
    return f"{count} {what}{'s' * (count != 1)}"


def interrupted(verb: str, result: Progress, total: int, error: RefusedError) -> RefusedError:
    """Return an error that includes the results before it."""
    return RefusedError(
        f"{error}\n{summary(verb, result, total)}; run the command again to continue"
    )
