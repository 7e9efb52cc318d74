"""`postbus receive`: takes messages over AMQP and prints them, one line of JSON each.

A message is settled after its line was written and flushed: when the reader of a pipe goes away,
or the command is interrupted, the message is still in the queue.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postbus.cli.client.contexts import ConnectionString, ContextName, Target, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import Exit, examples, expected_failures, fail
from postbus.cli.formats.output import as_json, write_line

if TYPE_CHECKING:
    from postbus.amqp.events import TransferReceived
    from postbus.amqp.performatives import DeliveryState
    from postbus.cli.client.amqp_session import Receiver

CREDIT: Final = 100
"""Most messages asked for ahead; what is asked for is locked."""

EPILOG: Final = examples(
    "postbus receive orders                       one message; it is gone then",
    "postbus receive orders --count 0             all there are",
    "postbus receive orders --count 10 --wait 60",
    "postbus receive orders --abandon             give it back; counts as a delivery",
    "postbus receive orders --to-dead-letter --reason 'no price'",
    "postbus receive orders --peek-lock 20        hold it for 20 s, then give it back",
    "postbus receive orders --session customer-7  also --session '' for the next one",
    "postbus receive order-events/Subscriptions/everything",
    "postbus receive 'orders/$DeadLetterQueue' --count 0 | jq .body",
)


def receive(
    entity: Annotated[
        str,
        typer.Argument(
            help="Queue, topic/Subscriptions/name, or one/$DeadLetterQueue.",
            autocompletion=complete_entities,
        ),
    ],
    count: Annotated[
        int, typer.Option("--count", "-n", min=0, help="Most messages; 0 is all there are.")
    ] = 1,
    complete: Annotated[bool, typer.Option("--complete", help="Remove them (default).")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Give them back.")] = False,
    to_dead_letter: Annotated[
        bool,
        typer.Option(
            "--to-dead-letter", help="Dead-letter them; they go to ENTITY/$DeadLetterQueue."
        ),
    ] = False,
    peek_lock: Annotated[
        float | None,
        typer.Option("--peek-lock", min=0, metavar="SECONDS", help="Hold them, then give back."),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Why dead-lettered.")] = None,
    description: Annotated[str | None, typer.Option("--description", help="More of that.")] = None,
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="Session id; '' is the next one.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="For the next message.")
    ] = 5.0,
    connection_string: ConnectionString = None,
    context: ContextName = None,
) -> None:
    """Receive messages and print each as a line of JSON; exits with 1 when there was none."""
    with expected_failures():
        if sum((complete, abandon, to_dead_letter, peek_lock is not None)) > 1:
            raise typer.BadParameter(
                "choose one of --complete, --abandon, --to-dead-letter, --peek-lock"
            )
        if (reason is not None or description is not None) and not to_dead_letter:
            raise typer.BadParameter("--reason and --description go with --to-dead-letter")
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
            if taking.is_short:  # else its reader went away
                fail(f"nothing came within {wait:g} s", Exit.DIFFERENT)
            raise typer.Exit(Exit.DIFFERENT)


class _Taking:
    """One run of the command."""

    def __init__(
        self,
        target: Target,
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
        """Less came than was asked for: nothing is there, or the bus cannot say."""
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
        """Print and settle; what is left in `_unsettled` goes back."""
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
    """Print a message; False when nobody reads any more."""
    from postbus.cli.formats.message_json import decode_json_message

    told = decode_json_message(delivery.payload)
    try:
        write_line(as_json(told))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return False
    return True
