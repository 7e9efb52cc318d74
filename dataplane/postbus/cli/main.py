"""The commands that run a bus, and the whole program: `dev`, `serve`, `check`.

Turns options into settings. What a command needs it imports when it is called: help and completion
are to come at once.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import typer.main
from rich.markup import escape

from postbus import __version__
from postbus.broker.partition.clock import ClockMode
from postbus.cli.client.contexts import context, context_names
from postbus.cli.commands import (
    audit,
    connections,
    entities,
    keys,
    manifests,
    messages,
    receive,
    report,
    send,
    tokens,
)
from postbus.cli.commands.dead_letters import dlq
from postbus.cli.commands.development import clock, fault
from postbus.cli.failures import Exit, InputError, err, examples, expected_failures, out
from postbus.cli.help_types import name_types

RUNNING_CODES: Final = """
[bold]Exit codes[/bold]
  0 stopped as asked, 2 usage, 3 settings, 4 manifests,
  5 data directory, port or certificate, 6 Postgres,
  8 another process took over, 70 a bug
"""
EPILOG: Final = examples(
    "postbus dev                     a bus with one queue, queue.1",
    "postbus send queue.1 hello      in another shell of the same folder",
    "postbus receive queue.1",
    "postbus get queues              what there is, with counts",
    "postbus apply bus.yaml          declare more",
)
DEV_EPILOG: Final = examples(
    "postbus dev                     a bus with one queue, queue.1",
    "postbus dev examples/           the queues declared in a folder",
    "postbus dev --ephemeral         forgets everything when it stops",
    "postbus dev --port 0            a second bus beside another",
    "postbus dev bus.yaml --data /tmp/b --port 5700",
    "POSTBUS_DATA=/tmp/b postbus status   commands find it by its folder",
    "postbus dev --clock manual      a bus for tests; then, in another shell:",
    "postbus clock advance 5m        let five minutes pass at once",
    codes=RUNNING_CODES,
)
SERVE_EPILOG: Final = examples(
    "POSTBUS_STORES=postgresql://bus@db/bus postbus serve bus.yaml",
    "postbus serve manifests/ --host 0.0.0.0 --log-format json",
    "postbus serve bus.yaml --take-over   ask the one that runs to end, then start",
    "postbus serve bus.yaml --no-wait     no stand-by: 6 while another of this name lives",
    codes=RUNNING_CODES,
)
CHECK_EPILOG: Final = examples(
    "postbus check bus.yaml          only look for mistakes",
    "postbus check examples/         all manifests of a folder",
    "postbus check - < bus.yaml      of standard input",
)

app = typer.Typer(
    name="postbus",
    help="A service bus with the semantics and the protocol of Azure Service Bus, durable in"
    " Postgres.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(clock, name="clock")
app.add_typer(fault, name="fault")
app.add_typer(context, name="context")
app.add_typer(keys.keys, name="keys")
app.command("connections", epilog=connections.EPILOG)(connections.connections)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("connection-string", epilog=keys.CONNECTION_EPILOG)(keys.connection_string)
PANELS: Final[dict[str, tuple[tuple[str, Callable[..., None], str], ...]]] = {
    "Definitions": (
        ("apply", manifests.apply, manifests.APPLY_EPILOG),
        ("diff", manifests.diff, manifests.DIFF_EPILOG),
        ("export", manifests.export, manifests.EXPORT_EPILOG),
        ("import", manifests.import_config, manifests.IMPORT_EPILOG),
        ("get", entities.get, entities.GET_EPILOG),
        ("describe", entities.describe, entities.DESCRIBE_EPILOG),
        ("delete", entities.delete, entities.DELETE_EPILOG),
        ("restore", entities.restore, entities.RESTORE_EPILOG),
        ("status", entities.status, entities.STATUS_EPILOG),
        ("audit", audit.audit, audit.EPILOG),
    ),
    "Messages": (
        ("send", send.send, send.EPILOG),
        ("receive", receive.receive, receive.EPILOG),
        ("peek", messages.peek, messages.PEEK_EPILOG),
        ("purge", messages.purge, messages.PURGE_EPILOG),
        ("token", tokens.token, tokens.EPILOG),
    ),
}
for _panel, _commands in PANELS.items():
    for _name, _command, _epilog in _commands:
        app.command(_name, epilog=_epilog, rich_help_panel=_panel)(_command)
app.add_typer(dlq, name="dlq", rich_help_panel="Messages")

Manifests = Annotated[
    list[Path] | None,
    typer.Argument(help="Files of Kubernetes manifests, or folders of *.yaml.", show_default=False),
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the bus's data [.postbus].")]
Stores = Annotated[
    str | None,
    typer.Option("--stores", help="Postgres; with a password use POSTBUS_STORES.", metavar="URL"),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on [127.0.0.1].")]
Port = Annotated[int | None, typer.Option("--port", help="Port without TLS [5672]; 0: any free.")]
TlsPort = Annotated[int | None, typer.Option("--tls-port", help="Port of TLS [5671]; 0: any free.")]
HttpPort = Annotated[int | None, typer.Option("--http-port", help="HTTP [5300]; 0: any free.")]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", help="Metrics and health [9464]; 0: any.")
]
ControlPort = Annotated[
    int | None, typer.Option("--control-port", help="Control API [9465]; 0: any free.")
]
Unsafe = Annotated[
    bool, typer.Option("--unsafe", help="Accept a Postgres that may lose accepted messages.")
]
LOG_FORMATS: Final = ("human", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="FORMAT", help="human or json; else human.",
        autocompletion=lambda: LOG_FORMATS,
    ),
]  # fmt: skip
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", metavar="LEVEL", help="debug, info, warning or error; else info.",
        autocompletion=lambda: LOG_LEVELS,
    ),
]  # fmt: skip


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    named: Annotated[
        str | None,
        typer.Option(
            "--context", "-C", help="As behind the command.", metavar="NAME",
            autocompletion=context_names,
        ),
    ] = None,
) -> None:  # fmt: skip
    if named is not None:  # an option behind the command still goes first
        os.environ["POSTBUS_CONTEXT"] = named
    if version:
        out.print(f"postbus {__version__}")
        raise typer.Exit


@app.command(epilog=DEV_EPILOG)
def dev(
    manifests: Manifests = None,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    tls_port: TlsPort = None,
    http_port: HttpPort = None,
    metrics_port: MetricsPort = None,
    control_port: ControlPort = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Keep everything in a folder that is deleted.")
    ] = False,
    clock_mode: Annotated[
        ClockMode,
        typer.Option("--clock", help="manual: `postbus clock advance` moves the time of messages."),
    ] = ClockMode.WALL,
    unsafe: Unsafe = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a complete bus on this machine, with a Postgres of its own."""
    if ephemeral and data is not None:
        raise typer.BadParameter("--ephemeral and --data exclude each other")
    from postbus.cli.serving.running import local_bus, run_bus, with_free_ports
    from postbus.manifests.reader import read_one_bus
    from postbus.process.settings import load_settings

    with expected_failures(), ExitStack() as cleanup:
        found_as: Path | None = None
        if ephemeral:
            found_as = load_settings().data
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="postbus-"))
            data = Path(folder)
        settings = load_settings(
            data=data,
            host=host,
            port=port,
            tls_port=tls_port,
            http_port=http_port,
            metrics_port=metrics_port,
            control_port=control_port,
            is_unsafe=unsafe or None,
            log_format=log_format,
            log_level=log_level,
        )
        bare = local_bus(settings.host)
        settings, remarks = with_free_ports(settings)
        is_quiet = err.is_terminal and "log_level" not in settings.model_fields_set
        is_embedded = settings.stores is None
        run_bus(
            settings,
            lambda: read_one_bus(manifests) if manifests else bare,
            is_embedded=is_embedded,
            dev_clock=clock_mode,
            is_quiet=is_quiet,
            remarks=remarks,
            found_as=found_as,
        )


@app.command(epilog=SERVE_EPILOG)
def serve(
    manifests: Manifests = None,
    stores: Stores = None,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    tls_port: TlsPort = None,
    http_port: HttpPort = None,
    metrics_port: MetricsPort = None,
    control_port: ControlPort = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Ask a living process of this broker's name to end."),
    ] = False,
    no_wait: Annotated[
        bool,
        typer.Option("--no-wait", help="Exit with 6 while another process of this name lives."),
    ] = False,
    unsafe: Unsafe = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a broker on a Postgres that you provide.

    While another process of its name lives it waits, takes nothing and is not ready.
    """
    if take_over and no_wait:
        raise typer.BadParameter("--take-over and --no-wait exclude each other")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read its manifests again
    from postbus.cli.serving.rivals import Meeting
    from postbus.cli.serving.running import DEFAULT_BUS, run_bus
    from postbus.manifests.reader import read_one_bus
    from postbus.process.settings import SettingsError, load_settings

    with expected_failures():
        settings = load_settings(
            data=data,
            stores=stores,
            host=host,
            port=port,
            tls_port=tls_port,
            http_port=http_port,
            metrics_port=metrics_port,
            control_port=control_port,
            is_unsafe=unsafe or None,
            log_format=log_format,
            log_level=log_level,
        )
        if settings.stores is None:
            raise SettingsError(
                "POSTBUS_STORES: give the address of Postgres, or use `postbus dev`"
            )
        otherwise = Meeting.REFUSE if no_wait else Meeting.WAIT
        run_bus(
            settings,
            lambda: read_one_bus(manifests) if manifests else DEFAULT_BUS,
            is_embedded=False,
            meeting=Meeting.TAKE_OVER if take_over else otherwise,
        )


@app.command(epilog=CHECK_EPILOG)
def check(
    manifests: Annotated[list[Path], typer.Argument(help="Files, or folders of *.yaml.")],
) -> None:
    """Look for mistakes in manifests without starting anything."""
    from postbus.manifests.reader import read_manifests

    with expected_failures():
        buses = read_manifests(manifests)
        if not buses:
            raise InputError(f"{', '.join(map(str, manifests))}: there are no manifests in it")
        for bus in buses:
            for warning in bus.warnings:
                out.print(f"[yellow]warning[/yellow] {escape(str(warning))}", soft_wrap=True)
            tier = bus.properties.sku.name.value
            entities = {
                "queue": bus.queues,
                "topic": bus.topics,
                "subscription": bus.subscriptions,
            }
            counts = ", ".join(
                f"{len(each)} {kind}{'s' * (len(each) != 1)}" for kind, each in entities.items()
            )
            out.print(f"[green]ok[/green] {escape(bus.name)} ({tier}), {counts}")


def program() -> Any:
    """Return the whole command, as `run` runs it."""
    command = typer.main.get_command(app)
    name_types(command)
    return command


def run() -> None:
    """Run the command line; an unexpected error leaves its traceback and exit code 70."""
    # SIGTERM as Ctrl-C: what is held is given back. A shell's background jobs and some supervisors
    # start us with SIGINT ignored or signals blocked, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        program()(prog_name="postbus")
    except Exception:  # noqa: BLE001 the last one who can say it
        err.print_exception()
        err.print("[red]postbus:[/red] this is an error of Postbus; please report it")
        sys.exit(Exit.BUG)
