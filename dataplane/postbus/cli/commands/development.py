"""`postbus clock` and `postbus fault`: control of a running development bus."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.failures import RefusedError, examples, expected_failures, out

SHORT_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d{1,3})?)s)?")

CODES: Final = """
[bold]Exit codes[/bold]
  0 done, 2 usage, 3 settings, 7 no bus answers, or it refuses the request
"""
CLOCK_EPILOG: Final = examples(
    "postbus dev --clock manual             a bus with a manual clock",
    "postbus clock                          show the time of messages",
    "postbus clock advance 5m               move it by five minutes",
    "postbus clock advance 1h30m            also 90s, 2h, 7d and ISO 8601: PT90S, P7D",
    "postbus clock advance 7d --control-port 9470",
    codes=CODES,
)
FAULT_EPILOG: Final = examples(
    "postbus fault lose-locks orders        expire all message locks",
    "postbus fault store-outage 10s         simulate an outage of Postgres, in real time",
    "postbus fault store-outage 10s --partition 3",
    codes=CODES,
)

clock = typer.Typer(
    help="Show or advance the time of messages (needs `postbus dev --clock manual`).",
    epilog=CLOCK_EPILOG,
    rich_markup_mode="rich",
)
fault = typer.Typer(
    help="Inject faults into a bus of `postbus dev`, to test your programs.",
    epilog=FAULT_EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)


def read_duration(text: str) -> str:
    """Return the ISO 8601 form of `90s`, `5m`, `2h`, `7d`, `1h30m` or an ISO 8601 duration."""
    from postbus.contract.durations import format_duration, parse_duration_ms

    short = SHORT_DURATION.fullmatch(text)
    try:
        if short is None or not any(short.groups()):
            return format_duration(parse_duration_ms(text))
        days, hours, minutes, seconds = short.groups(default="0")
        return format_duration(parse_duration_ms(f"P{days}DT{hours}H{minutes}M{seconds}S"))
    except ValueError:
        raise typer.BadParameter("use 90s, 5m, 2h, 7d, or ISO 8601 such as PT5M") from None


ControlPort = Annotated[
    int | None, typer.Option("--control-port", help="Control port of the bus [9465].")
]
Duration = Annotated[
    str, typer.Argument(parser=read_duration, metavar="DURATION", help="Such as 90s, 5m, 2h, 7d.")
]


# --- clock --------------------------------------------------------------------------------------


@clock.callback(invoke_without_command=True)
def _show(
    invoked: typer.Context, control_port: ControlPort = None, context: ContextName = None
) -> None:
    invoked.obj = control_port, context
    if invoked.invoked_subcommand is None:
        with expected_failures():
            _print_clock(_call("GET", "/v1/clock", None, control_port, context))


@clock.command(epilog=CLOCK_EPILOG)
def advance(
    invoked: typer.Context,
    duration: Duration,
    control_port: ControlPort = None,
    context: ContextName = None,
) -> None:
    """Advance the time of messages; everything due has happened when the command returns."""
    with expected_failures():
        port, named = invoked.obj
        port = port if control_port is None else control_port
        body = {"duration": duration}
        _print_clock(_call("POST", "/v1/clock/advance", body, port, context or named))


def _print_clock(answer: dict[str, Any]) -> None:
    from postbus.contract.durations import format_duration

    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]clock[/bold]", answer["mode"])
    table.add_row("[bold]now[/bold]", answer["now"])
    table.add_row("[bold]ahead[/bold]", format_duration(answer["offsetMs"]))
    out.print(table)


# --- faults -------------------------------------------------------------------------------------


@fault.command("lose-locks", epilog=FAULT_EPILOG)
def lose_locks(
    entity: Annotated[str, typer.Argument(help="Name of a queue.")],
    control_port: ControlPort = None,
    context: ContextName = None,
) -> None:
    """Expire all locks of an entity: its messages become available again."""
    with expected_failures():
        answer = _call("POST", "/v1/faults/lose-locks", {"entity": entity}, control_port, context)
        out.print(f"all locks of {escape(answer['entity'])} have expired")


@fault.command("store-outage", epilog=FAULT_EPILOG)
def store_outage(
    duration: Duration,
    partition: Annotated[
        int | None, typer.Option("--partition", help="Only this partition; default: all.")
    ] = None,
    control_port: ControlPort = None,
    context: ContextName = None,
) -> None:
    """Simulate an outage of the store in real time; the bus then recovers by itself."""
    with expected_failures():
        body = {"duration": duration, "partition": partition}
        answer = _call("POST", "/v1/faults/store-outage", body, control_port, context)
        which = f"partition {partition}" if partition is not None else "all partitions"
        out.print(f"the store is unavailable to {which} for {answer['duration']}")


# --- calling ------------------------------------------------------------------------------------


def _call(
    method: str,
    path: str,
    body: Mapping[str, object] | None,
    control_port: int | None,
    context: str | None,
) -> dict[str, Any]:
    """Return the bus's answer; raises `RefusedError`."""
    from postbus.cli.client.control_client import ControlClient, run_with

    async def ask(control: ControlClient) -> dict[str, Any]:
        answer: dict[str, Any] = await control.ask(method, path, body)
        if not isinstance(answer, dict):
            raise RefusedError("the answer is not from the control API of a bus")
        return answer

    return run_with(find_target(context, control_port=control_port), ask)
