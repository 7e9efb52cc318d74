"""`postbus receive`: receives messages over AMQP and prints them, one line of JSON each.

A message is settled after its line was written and flushed: when the reader of a pipe closes it, or
the command is interrupted, the message stays in the queue.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postbus.cli.client.contexts import BusAddress, ConnectionString, ContextName, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import Exit, examples, expected_failures, fail
from postbus.cli.formats.output import as_json, write_line

if TYPE_CHECKING:
    from postbus.amqp.events import TransferReceived
    from postbus.amqp.performatives import DeliveryState
    from postbus.cli.client.amqp_session import Receiver

CREDIT: Final = 100
"""Maximum number of prefetched messages, which are locked."""

EPILOG: Final = examples(
    "postbus receive orders                       one message, removed from the queue",
    "postbus receive orders --count 0             all available messages",
    "postbus receive orders --count 10 --wait 60",
    "postbus receive orders --abandon             release it; counts as a delivery",
    "postbus receive orders --to-dead-letter --reason 'no price'",
    "postbus receive orders --peek-lock 20        lock it for 20 s, then release it",
    "postbus receive orders --session customer-7  --session '' for the next session",
    "postbus receive order-events/Subscriptions/everything",
    "postbus receive 'orders/$DeadLetterQueue' --count 0 | jq .body",
)


def receive(
    entity: Annotated[
        str,
        typer.Argument(
            help="Queue, topic/Subscriptions/name, or its /$DeadLetterQueue.",
            autocompletion=complete_entities,
        ),
    ],
    count: Annotated[
        int,
        typer.Option("--count", "-n", min=0, help="Maximum number of messages; 0: all available."),
    ] = 1,
    complete: Annotated[
        bool, typer.Option("--complete", help="Complete the messages (default).")
    ] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Abandon the messages: they become available again.")
    ] = False,
    to_dead_letter: Annotated[
        bool,
        typer.Option("--to-dead-letter", help="Move the messages to ENTITY/$DeadLetterQueue."),
    ] = False,
    peek_lock: Annotated[
        float | None,
        typer.Option(
            "--peek-lock",
            min=0,
            metavar="SECONDS",
            help="Lock the messages for this time, then release them.",
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Dead-letter reason.")] = None,
    description: Annotated[
        str | None, typer.Option("--description", help="Dead-letter description.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", "-s", help="Session id; '': the next available session."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0, metavar="SECONDS", help="Maximum wait for the next message."),
    ] = 5.0,
    connection_string: ConnectionString = None,
    context: ContextName = None,
) -> None:
    """Receive messages and print each as a line of JSON; exits with 1 if there is none."""
    with expected_failures():
        if sum((complete, abandon, to_dead_letter, peek_lock is not None)) > 1:
            raise typer.BadParameter(
                "use only one of --complete, --abandon, --to-dead-letter, --peek-lock"
            )
        if (reason is not None or description is not None) and not to_dead_letter:
            raise typer.BadParameter("--reason and --description need --to-dead-letter")
        from postbus.amqp.performatives import Accepted, Modified, Rejected

        outcome: DeliveryState = Accepted()
        if abandon or peek_lock is not None:
            outcome = Modified(delivery_failed=True)
        elif to_dead_letter:
            said = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description}
            info = {name: value for name, value in said.items() if value is not None}
            outcome = Rejected("com.microsoft:dead-letter", None, info or None)
        target = find_target(context, connection_string=connection_string)
        taking = _Taking(target, entity, session, count, wait, outcome, peek_lock)
        if not asyncio.run(taking.run()):
            if taking.is_short:  # else the reader of the output closed it
                fail(f"no message arrived within {wait:g} s", Exit.DIFFERENT)
            raise typer.Exit(Exit.DIFFERENT)


class _Taking:
    """One run of the command."""

    def __init__(
        self,
        target: BusAddress,
        entity: str,
        session_id: str | None,
        count: int,
        wait_s: float,
        outcome: DeliveryState,
        hold_s: float | None,
    ) -> None:
        self._target = target
        self._entity = entity
        self._session_id = session_id
        self._most = count or sys.maxsize
        self._wait_s = wait_s
        self._outcome = outcome
        self._hold_s = hold_s
        self.is_short = False
        """Fewer messages came than requested: none is available, or the bus cannot know."""
        self._unsettled: list[TransferReceived] = []
        self._settling: deque[asyncio.Future[DeliveryState | None]] = deque()

    async def run(self) -> int:
        """Return how many messages were printed."""
        from postbus.amqp.performatives import Released
        from postbus.cli.client.amqp_session import NoSessionError, connected
        from postbus.cli.client.connection_strings import read_connection_string

        target = self._target
        endpoint = read_connection_string(target.connection_string())
        async with connected(endpoint, self._entity, target.context.ca_file) as session:
            try:
                receiver = await session.receiver(
                    self._entity, self._session_id, wait_s=self._wait_s
                )
            except NoSessionError:
                await session.look(self._entity)
                self.is_short = True
                return 0
            try:
                taken = await self._take(receiver)
                if self.is_short:
                    await session.look(self._entity)
                return taken
            finally:
                while self._settling:
                    await receiver.settled(self._settling.popleft(), self._outcome)
                self._unsettled += await receiver.withdraw()
                for delivery in self._unsettled:
                    await receiver.settle(delivery.delivery_id, Released())

    async def _take(self, receiver: Receiver) -> int:
        """Print and settle messages; those left in `_unsettled` are released."""
        taken = 0
        receiver.grant(min(self._most, CREDIT))
        while taken < self._most:
            delivery = await receiver.next(self._wait_s)
            if delivery is None:
                self.is_short = True
                break
            self._unsettled.append(delivery)
            if not _is_shown(delivery):
                return taken
            taken += 1
            if self._hold_s is None:
                self._unsettled.pop()
                self._settling.append(receiver.decide(delivery.delivery_id, self._outcome))
                while len(self._settling) > CREDIT // 2:
                    await receiver.settled(self._settling.popleft(), self._outcome)
            wanted = min(self._most - taken - receiver.waiting, CREDIT)
            if receiver.credit <= min(wanted - 1, CREDIT // 2):
                receiver.grant(wanted)
        if self._unsettled and self._hold_s is not None:
            await asyncio.sleep(self._hold_s)
        return taken


def _is_shown(delivery: TransferReceived) -> bool:
    """Print a message; False when the reader of the output closed it."""
    from postbus.cli.formats.message_json import decode_json_message

    answer = decode_json_message(delivery.payload)
    try:
        write_line(as_json(answer))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return False
    return True
