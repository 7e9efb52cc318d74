"""The whole program, and the commands that run a bus: `dev`, `serve`, `check`.

Turns options into settings. A command imports what it needs when it is called, so that help and
completion are immediate.
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
    groups,
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
    "postbus get queues              list queues with counts",
    "postbus apply bus.yaml          create more entities",
)
DEV_EPILOG: Final = examples(
    "postbus dev                     a bus with one queue, queue.1",
    "postbus dev examples/           the queues declared in a folder",
    "postbus dev --ephemeral         delete all data when it stops",
    "postbus dev --port 0            a second bus beside another",
    "postbus dev bus.yaml --data /tmp/b --port 5700",
    "POSTBUS_DATA=/tmp/b postbus status   commands find the bus by its folder",
    "postbus dev --clock manual      a bus for tests; then, in another shell:",
    "postbus clock advance 5m        move the time of messages by 5 minutes",
    codes=RUNNING_CODES,
)
SERVE_EPILOG: Final = examples(
    "POSTBUS_STORES=postgresql://bus@db/bus postbus serve bus.yaml",
    "postbus serve manifests/ --host 0.0.0.0 --log-format json",
    "postbus serve bus.yaml --take-over   ask the running process to end, then start",
    "postbus serve bus.yaml --no-wait     exit with 6 instead of becoming a standby",
    codes=RUNNING_CODES,
)
CHECK_EPILOG: Final = examples(
    "postbus check bus.yaml          validate one file",
    "postbus check examples/         validate all manifests in a folder",
    "postbus check - < bus.yaml      validate standard input",
)

app = typer.Typer(
    name="postbus",
    help="A service bus with the protocol and semantics of Azure Service Bus, durable in Postgres.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(clock, name="clock")
app.add_typer(fault, name="fault")
app.add_typer(context, name="context")
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
    ),
    "Messages": (
        ("send", send.send, send.EPILOG),
        ("receive", receive.receive, receive.EPILOG),
        ("peek", messages.peek, messages.PEEK_EPILOG),
        ("purge", messages.purge, messages.PURGE_EPILOG),
    ),
    "Monitoring": (
        ("status", entities.status, entities.STATUS_EPILOG),
        ("connections", connections.connections, connections.EPILOG),
        ("audit", audit.audit, audit.EPILOG),
        ("report", report.report, report.EPILOG),
    ),
    "Access": (
        ("connection-string", keys.connection_string, keys.CONNECTION_EPILOG),
        ("token", tokens.token, tokens.EPILOG),
    ),
}
for _panel, _commands in PANELS.items():
    for _name, _command, _epilog in _commands:
        app.command(_name, epilog=_epilog, rich_help_panel=_panel)(_command)
app.add_typer(dlq, name="dlq", rich_help_panel="Messages")
app.add_typer(groups.groups, name="groups", rich_help_panel="Messages")
app.add_typer(keys.keys, name="keys", rich_help_panel="Access")

Manifests = Annotated[
    list[Path] | None,
    typer.Argument(help="Manifest files, or folders of *.yaml.", show_default=False),
]
Data = Annotated[Path | None, typer.Option("--data", help="Data directory [.postbus].")]
Stores = Annotated[
    str | None,
    typer.Option(
        "--stores", help="Postgres URL; if it has a password, use POSTBUS_STORES.", metavar="URL"
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on [127.0.0.1].")]
Port = Annotated[
    int | None, typer.Option("--port", help="AMQP port without TLS [5672]; 0: any free.")
]
TlsPort = Annotated[
    int | None, typer.Option("--tls-port", help="Port with TLS [5671]; 0: any free.")
]
HttpPort = Annotated[int | None, typer.Option("--http-port", help="HTTP port [5300]; 0: any free.")]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", help="Metrics and health port [9464]; 0: any free.")
]
ControlPort = Annotated[
    int | None, typer.Option("--control-port", help="Control API port [9465]; 0: any free.")
]
Unsafe = Annotated[
    bool,
    typer.Option(
        "--unsafe", help="Accept a Postgres configuration that may lose accepted messages."
    ),
]
LOG_FORMATS: Final = ("human", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", metavar="FORMAT", help="human or json; default: human.",
        autocompletion=lambda: LOG_FORMATS,
    ),
]  # fmt: skip
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level", metavar="LEVEL", help="debug, info, warning or error; default: info.",
        autocompletion=lambda: LOG_LEVELS,
    ),
]  # fmt: skip


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    named: Annotated[
        str | None,
        typer.Option(
            "--context", "-C", metavar="NAME",
            help="Context for any command; see postbus context list.",
            autocompletion=context_names,
        ),
    ] = None,
) -> None:  # fmt: skip
    if named is not None:  # the command's own option takes precedence
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
        bool,
        typer.Option(
            "--ephemeral", help="Use a temporary data directory and delete it at the end."
        ),
    ] = False,
    clock_mode: Annotated[
        ClockMode,
        typer.Option(
            "--clock", help="manual: the time of messages moves with `postbus clock advance`."
        ),
    ] = ClockMode.WALL,
    unsafe: Unsafe = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a complete bus on this machine, with its own Postgres."""
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
        is_embedded = not settings.has_stores
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
        typer.Option("--take-over", help="Ask a running process with the same broker name to end."),
    ] = False,
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="Exit with 6 if a process with the same broker name is running."
        ),
    ] = False,
    unsafe: Unsafe = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a broker on a Postgres that you provide.

    If another process with the same broker name is running, this one is a standby: it waits,
    accepts no clients and is not ready.
    """
    if take_over and no_wait:
        raise typer.BadParameter("--take-over and --no-wait exclude each other")
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # until the handler that rereads manifests is installed
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
        if not settings.has_stores:
            raise SettingsError(
                "POSTBUS_STORES is not set: set it to the URL of a Postgres (or POSTBUS_STORES_FILE"
                " to a file with it), or use `postbus dev`"
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
    manifests: Annotated[
        list[Path], typer.Argument(help="Manifest files, or folders of *.yaml; - is stdin.")
    ],
) -> None:
    """Validate manifests without starting anything."""
    from postbus.manifests.reader import read_manifests

    with expected_failures():
        buses = read_manifests(manifests)
        if not buses:
            raise InputError(f"{', '.join(map(str, manifests))}: no manifests found")
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
    """Return the complete command that `run` runs."""
    command = typer.main.get_command(app)
    name_types(command)
    return command


def run() -> None:
    """Run the command line; an unexpected error leaves its traceback and exit code 70."""
    # SIGTERM acts like Ctrl-C, so that locked messages are released. Background jobs of a shell and
    # some supervisors start us with SIGINT ignored or signals blocked, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        program()(prog_name="postbus")
    except Exception:  # noqa: BLE001 the last place to report it
        err.print_exception()
        err.print("[red]postbus:[/red] this is a bug in Postbus; please report it")
        sys.exit(Exit.BUG)
