"""Runs a bus in this process until a signal, for `dev` and `serve`.

Imported only when a bus is started, never for help: importing the bus takes most of a second.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.markup import escape
from rich.table import Table

from postbus.assembly.bus import Bus, BusError, OnStep
from postbus.broker.partition.clock import ClockMode
from postbus.cli.failures import Exit, err, fail, out
from postbus.cli.formats.emulator_config import EMULATOR_KEYS
from postbus.cli.formats.output import print_table
from postbus.cli.serving.rereading import Rereading
from postbus.cli.serving.rivals import Meeting, lock_data, meet_rivals
from postbus.contract.entities import ROOT_RULE_NAME, NamespaceProperties, QueueProperties, Right
from postbus.edge.access.admission import MAX_CONNECTIONS
from postbus.fast import BUILD, IS_ACCELERATED, IS_OUTDATED
from postbus.manifests.reader import BusDefinition, QueueDefinition, RuleDefinition
from postbus.process.allocator import keep_memory
from postbus.process.data_directory import DataDirectory
from postbus.process.descriptors import allow_descriptors
from postbus.process.exposure import exposures
from postbus.process.garbage import collect_forever
from postbus.process.local_bus import announced_as
from postbus.process.service_manager import MORE_TIME, notify
from postbus.process.settings import Settings, default_ssl_mode, is_loopback, unknown_variables
from postbus.process.telemetry import configure_logging
from postbus.store.postgres import Store

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS: Final = 1_000
"""Descriptors for files and connections to Postgres, in addition to clients."""

STANDING_LOOK_S: Final = 1.0
"""Interval of checks whether this standby took over; they cost no request."""

DEFAULT_BUS: Final = BusDefinition(
    "local-bus",
    NamespaceProperties(),
    (RuleDefinition(ROOT_RULE_NAME, frozenset(Right), None),),
    (QueueDefinition("queue.1", QueueProperties(), ()),),
)
"""The queue without manifests; examples for the official emulator use this name."""


def local_bus(host: str) -> BusDefinition:
    """Return the bus of `postbus dev` without manifests.

    If it is only reachable from this machine, it also has the public key of the official emulator,
    so that programs written for the emulator connect unchanged.
    """
    if not is_loopback(host):
        return DEFAULT_BUS
    (root,) = DEFAULT_BUS.rules
    return replace(DEFAULT_BUS, rules=(replace(root, keys=EMULATOR_KEYS),))


def key_remarks(definition: BusDefinition) -> list[str]:
    """Return warnings about publicly known keys."""
    if all(
        rule.keys is None or rule.keys.primary != EMULATOR_KEYS.primary for rule in definition.rules
    ):
        return []
    return ["this bus accepts SAS_KEY_VALUE, the public key of Microsoft's emulator"]


def with_free_ports(settings: Settings) -> tuple[Settings, list[str]]:
    """Replace default ports that are in use, for a second bus on this machine.

    Also returns remarks about that, to print when the bus listens. The plain port is not replaced,
    since connection strings contain it: if it is in use, the command ends here, before Postgres is
    started.
    """
    if settings.listens_plain and settings.port and not _is_free(settings.host, settings.port):
        fail(
            f"port {settings.port} on {settings.host} is in use, perhaps by another bus: stop it,"
            " or set another port with --port; 0 uses any free one",
            Exit.MACHINE,
        )
    changes: dict[str, int] = {}
    remarks = []
    for name, host in (
        ("tls_port", settings.host),
        ("http_port", settings.host),
        ("metrics_port", settings.metrics_host),
        ("control_port", settings.control_host),
    ):
        port = getattr(settings, name)
        explicit = [getattr(settings, each) for each in settings.model_fields_set]
        if name in settings.model_fields_set or (port not in explicit and _is_free(host, port)):
            continue
        remarks.append(f"port {port} is in use, using another for {name}")
        changes[name] = 0
    return settings.model_copy(update=changes), remarks


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def run_bus(
    settings: Settings,
    read: Callable[[], BusDefinition],
    *,
    is_embedded: bool,
    dev_clock: ClockMode | None = None,
    is_quiet: bool = False,
    remarks: Sequence[str] = (),
    found_as: Path | None = None,
    meeting: Meeting = Meeting.WAIT,
) -> None:
    """Run until SIGTERM or SIGINT; a second signal skips the grace period.

    `read` returns the definition of the bus, at the start and after each SIGHUP. `dev_clock`: the
    bus is for development; connection strings are printed with their keys. `is_quiet`: log warnings
    only, since the rest is printed. `remarks` are printed when the bus listens. `found_as`:
    commands that use this data directory find the bus too. `meeting`: action if another process
    with the broker's name is running.
    """
    if settings.accelerate == "require" and not IS_ACCELERATED:
        fail(
            "POSTBUS_ACCELERATE is require, but this installation has no compiled functions of this"
            " version: install the wheel of this platform, or run `make accelerate` in a checkout",
            Exit.MACHINE,
        )
    definition = read()
    keep_memory()
    configure_logging(settings.log_format, "warning" if is_quiet else settings.log_level)
    logger.info("starting", extra={"build": BUILD})
    if IS_OUTDATED:
        logger.warning("compiled functions are of another version and not used: make accelerate")
    allow_descriptors(MAX_CONNECTIONS + SPARE_DESCRIPTORS)
    for remark in unknown_variables():
        logger.warning("unknown setting", extra={"remark": remark})
    for remark in exposures(settings, default_ssl_mode()):
        logger.warning("insecure setting", extra={"remark": remark})

    async def prepare(store: Store, on_step: OnStep) -> None:
        if meeting is not Meeting.WAIT:
            await meet_rivals(store, definition.name, meeting, settings.grace_s, on_step)
        if meeting is Meeting.REFUSE:
            data.open()
        else:
            await lock_data(data, on_step)

    is_dev = dev_clock is not None
    end = End()
    with closing(DataDirectory(settings.data)) as data:
        if is_dev:
            data.open()
        bus = Bus(
            settings,
            definition,
            data,
            is_embedded=is_embedded,
            dev_clock=dev_clock,
            on_asked=end.hand_over,
            prepare=None if is_dev else prepare,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                said = [*remarks, *key_remarks(definition)] if is_dev else []
                runner.run(
                    _run_until_end(bus, data, read, end, settings.grace_s, is_dev, said, found_as)
                )
            except BusError as error:
                fail(str(error), Exit.STORE if error.is_about_store else Exit.MACHINE)
    if end.asked_by is not None:
        fail(f"stopped because another process takes over: {end.asked_by}", Exit.REPLACED)


class End:
    """A request to end, by a signal or by another process with the same broker name."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.asked_by: str | None = None
        self._is_signalled = False

    def signal(self) -> bool:
        """Record a signal; return whether it is a repeated one, which skips the grace period."""
        is_one_more, self._is_signalled = self._is_signalled, True
        self.is_asked.set()
        return is_one_more

    def hand_over(self, asked_by: str) -> None:
        self.asked_by = asked_by
        self.is_asked.set()


async def _run_until_end(
    bus: Bus,
    data: DataDirectory,
    read: Callable[[], BusDefinition],
    end: End,
    grace_s: float,
    is_dev: bool,
    remarks: Sequence[str],
    found_as: Path | None,
) -> None:
    loop = asyncio.get_running_loop()

    def ask() -> None:
        nonlocal grace_s
        if end.signal():
            grace_s = 0.0
            bus.cut_short()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    rereading = Rereading(read)
    # The bus ends when its terminal is closed.
    is_in_terminal = is_dev and sys.stdin.isatty()
    loop.add_signal_handler(signal.SIGHUP, ask if is_in_terminal else rereading.ask)
    beside: list[asyncio.Task[None]] = []
    stopping = asyncio.ensure_future(end.is_asked.wait())
    try:
        with _progress() as step:
            is_started = await _unless(stopping, bus.start(_with_time(step)))
        if is_started:
            beside.append(asyncio.create_task(rereading.follow(bus)))
            data.announce(bus.announcement())
            with announced_as(found_as, bus.announcement()) if found_as else nullcontext():
                for remark in remarks:
                    err.print(f"[yellow]postbus:[/yellow] {escape(remark)}")
                announce(bus, with_keys=is_dev)
                beside.append(asyncio.create_task(announce_standing(bus)))
                beside.append(asyncio.create_task(collect_forever()))
                await _unless(stopping, bus.wait())
    finally:
        stopping.cancel()
        notify("STOPPING=1")
        for each in beside:
            each.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        with _progress() as step:
            step("stopping")
            await bus.stop(grace_s)


async def _unless(stopping: asyncio.Future[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Await work unless a signal comes first; return whether the work was done."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


def _with_time(step: OnStep) -> OnStep:
    """Return a reporter of start steps that also extends the service manager's timeout."""

    def say(text: str) -> None:
        step(text)
        notify(MORE_TIME)

    return say


@contextmanager
def _progress() -> Iterator[Any]:
    """Yield a reporter of start steps: a spinner on a terminal, else log and systemd's status.

    After a colon a step may say why it takes long; a change of only that is not logged.
    """
    if not err.is_terminal:
        logged = ""

        def say(step: str) -> None:
            nonlocal logged
            notify(f"STATUS={step}")
            if (what := step.partition(": ")[0]) != logged:
                logger.info("step", extra={"step": what})
                logged = what

        yield say
        return
    with err.status("starting") as status:
        yield lambda step: status.update(f"{escape(step)} …")


def announce(bus: Bus, *, with_keys: bool) -> None:
    """Print the addresses of the bus."""
    table = Table.grid(padding=(0, 2))
    for name, value in bus.summary():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(value))
    print_table(table)
    for title, connection_string in bus.connection_strings() if with_keys else []:
        out.print(f"\n[bold]connection string[/bold] {escape(title)}:")
        out.print(escape(connection_string))
    if bus.authority_file is not None:
        out.print(
            "\nTLS clients trust this file (connection_verify=…, SSL_CERT_FILE=…):\n"
            + escape(str(bus.authority_file))
        )


async def announce_standing(bus: Bus) -> None:
    """Print a line that scripts can wait for, ready or standby and for whom, and notify systemd.

    For systemd a standby counts as started too: it fulfils its purpose.
    """
    was_ready: bool | None = None
    while True:
        held_by = bus.readiness.held_by
        if (is_ready := held_by is None) != was_ready:
            was_ready = is_ready
            standing = "ready" if is_ready else f"standby, the bus is {held_by}"
            colour = "green" if is_ready else "yellow"
            word, comma, more = standing.partition(",")
            out.print(f"\n[{colour}]{word}[/{colour}]{comma}{escape(more)}; Ctrl-C stops the bus")
            sys.stdout.flush()
            notify("READY=1", f"STATUS={standing}")
        await asyncio.sleep(STANDING_LOOK_S)
