"""The commands that run a bus, and the whole program: `dev`, `serve`, `check`.

Turns options into settings and runs a `Bus` until a signal comes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from postbus import __version__
from postbus.broker.clock import ClockMode
from postbus.cli.control import clock, fault
from postbus.cli.failures import Exit, err, expected_failures, fail, out
from postbus.contract import ROOT_RULE_NAME, NamespaceProperties, QueueProperties, Right
from postbus.data_directory import DataDirectory
from postbus.manifests import (
    BusDefinition,
    QueueDefinition,
    RuleDefinition,
    read_manifests,
    read_one_bus,
)
from postbus.settings import Settings, SettingsError, load_settings, unknown_variables

if TYPE_CHECKING:
    from postbus.bus import Bus


GC_THRESHOLDS: Final = (50_000, 20, 100)
"""Collections of a broker's memory find next to nothing, and each one is a pause."""

DEFAULT_BUS: Final = BusDefinition(
    "local-bus",
    NamespaceProperties(),
    (RuleDefinition(ROOT_RULE_NAME, frozenset(Right), None),),
    (QueueDefinition("queue.1", QueueProperties(), ()),),
)
"""Without manifests: the queue that examples for the official emulator use."""

EPILOG: Final = """
[bold]Examples[/bold]

  postbus dev                     a bus with one queue, queue.1

  postbus dev examples/           the queues declared in a folder

  postbus dev --ephemeral         forgets everything when it stops

  postbus dev bus.yaml --data /tmp/b --port 5700

  POSTBUS_STORES=postgresql://bus@db/bus postbus serve bus.yaml

  postbus check bus.yaml          only look for mistakes

  postbus dev --clock manual      a bus for tests; then, in another shell:

  postbus clock advance 5m        let five minutes pass at once

[bold]Exit codes[/bold]

  0 stopped as asked, 2 usage, 3 settings, 4 manifests,

  5 data directory, port or certificate, 6 Postgres,

  7 no bus answers, or it refuses, 70 a bug
"""

app = typer.Typer(
    name="postbus",
    help="A service bus with the semantics and the protocol of Azure Service Bus, durable in"
    " Postgres.",
    epilog=EPILOG,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(clock, name="clock")
app.add_typer(fault, name="fault")
logger = logging.getLogger(__name__)

Manifests = Annotated[
    list[Path] | None,
    typer.Argument(help="Files of Kubernetes manifests, or folders of *.yaml.", show_default=False),
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the bus's data [.postbus].")]
Stores = Annotated[
    str | None,
    typer.Option("--stores", help="Addresses of Postgres; safer in POSTBUS_STORES.", metavar="URL"),
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
LogFormat = Annotated[str | None, typer.Option("--log-format", help="human or json [human].")]
LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"postbus {__version__}")
        raise typer.Exit


@app.command(epilog=EPILOG)
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
    with expected_failures(), ExitStack() as cleanup:
        if ephemeral:
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
        definition = read_one_bus(manifests) if manifests else DEFAULT_BUS
        settings = with_free_ports(settings)
        is_quiet = err.is_terminal and "log_level" not in settings.model_fields_set
        is_embedded = settings.stores is None
        run_bus(
            settings, definition, is_embedded=is_embedded, dev_clock=clock_mode, is_quiet=is_quiet
        )


@app.command(epilog=EPILOG)
def serve(
    manifests: Manifests = None,
    stores: Stores = None,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    tls_port: TlsPort = None,
    http_port: HttpPort = None,
    metrics_port: MetricsPort = None,
    unsafe: Unsafe = False,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Run a broker on a Postgres that you provide."""
    with expected_failures():
        settings = load_settings(
            data=data,
            stores=stores,
            host=host,
            port=port,
            tls_port=tls_port,
            http_port=http_port,
            metrics_port=metrics_port,
            is_unsafe=unsafe or None,
            log_format=log_format,
            log_level=log_level,
        )
        if settings.stores is None:
            raise SettingsError(
                "POSTBUS_STORES: give the address of Postgres, or use `postbus dev`"
            )
        definition = read_one_bus(manifests) if manifests else DEFAULT_BUS
        run_bus(settings, definition, is_embedded=False)


@app.command(epilog=EPILOG)
def check(
    manifests: Annotated[list[Path], typer.Argument(help="Files, or folders of *.yaml.")],
) -> None:
    """Look for mistakes in manifests without starting anything."""
    with expected_failures():
        for bus in read_manifests(manifests):
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


# --- running ------------------------------------------------------------------------------------


def with_free_ports(settings: Settings) -> Settings:
    """Let a second bus on this machine have other ports where nobody chose one.

    Not the plain port: connection strings are made for it.
    """
    changes: dict[str, int] = {}
    for name, host in (
        ("tls_port", settings.host),
        ("http_port", settings.host),
        ("metrics_port", settings.metrics_host),
        ("control_port", "127.0.0.1"),
    ):
        port = getattr(settings, name)
        chosen = [getattr(settings, each) for each in settings.model_fields_set]
        if name in settings.model_fields_set or (port not in chosen and _is_free(host, port)):
            continue
        err.print(f"[yellow]postbus:[/yellow] port {port} is taken, using another as {name}")
        changes[name] = 0
    return settings.model_copy(update=changes)


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def run_bus(
    settings: Settings,
    definition: BusDefinition,
    *,
    is_embedded: bool,
    dev_clock: ClockMode | None = None,
    is_quiet: bool = False,
) -> None:
    """Run until SIGTERM or SIGINT; a second signal does not wait for the grace period.

    `dev_clock`: the bus is for development; show connection strings, which hold a key. `is_quiet`:
    log warnings only, since what is printed says the rest.
    """
    import uvloop  # with the bus it takes most of a second, too long for --help and `check`

    from postbus.allocator import keep_memory
    from postbus.bus import Bus, BusError
    from postbus.telemetry import configure_logging

    keep_memory()
    configure_logging(settings.log_format, "warning" if is_quiet else settings.log_level)
    for remark in unknown_variables():
        logger.warning("unknown setting", extra={"remark": remark})
    with DataDirectory(settings.data) as data:
        bus = Bus(settings, definition, data, is_embedded=is_embedded, dev_clock=dev_clock)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(_run_until_signal(bus, settings.grace_s, dev_clock is not None))
            except BusError as error:
                fail(str(error), Exit.STORE if error.is_about_store else Exit.MACHINE)


async def _run_until_signal(bus: Bus, grace_s: float, is_dev: bool) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        nonlocal grace_s
        if asked.is_set():
            grace_s = 0.0
            bus.cut_short()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    stopping = asyncio.ensure_future(asked.wait())
    try:
        with _progress() as step:
            is_started = await _unless(stopping, bus.start(step))
        if is_started:
            announce(bus, with_keys=is_dev)
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            await _unless(stopping, bus.wait())
    finally:
        stopping.cancel()
        with _progress() as step:
            step("stopping")
            await bus.stop(grace_s)


async def _unless(stopping: asyncio.Future[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Await work unless a signal comes first; whether the work was done."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield what tells a step: a spinner on a terminal, log lines elsewhere."""
    if not err.is_terminal:
        yield lambda step: logger.info("step", extra={"step": step})
        return
    with err.status("starting") as status:
        yield lambda step: status.update(f"{escape(step)} …")


def announce(bus: Bus, *, with_keys: bool) -> None:
    """Print how to reach the bus, and a line that scripts may wait for."""
    table = Table.grid(padding=(0, 2))
    for name, value in bus.summary():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(value))
    out.print(table)
    for title, connection_string in bus.connection_strings() if with_keys else []:
        out.print(f"\n[bold]connection string[/bold] {escape(title)}:")
        out.print(escape(connection_string))
    if bus.authority_file is not None:
        out.print(
            "\nTLS clients trust this file (connection_verify=…, SSL_CERT_FILE=…):\n"
            + escape(str(bus.authority_file))
        )
    out.print("\n[green]ready[/green]; Ctrl-C stops the bus")
    sys.stdout.flush()


def run() -> None:
    """Run the command line; an unexpected error leaves its traceback and exit code 70."""
    try:
        app()
    except Exception:  # noqa: BLE001 the last one who can say it
        err.print_exception()
        err.print("[red]postbus:[/red] this is an error of Postbus; please report it")
        sys.exit(Exit.BUG)
