"""`postbus report`: an archive for the analysis of a problem with a bus.

It is meant to be sent elsewhere, so it must contain no secret: keys are never requested, and
anything that looks like a secret is masked. A missing part is listed with the reason, since reports
are needed most when not everything works.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import re
import stat
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from postbus import __version__
from postbus.cli.client.contexts import BusAddress, ContextName, find_target
from postbus.cli.failures import (
    ContextError,
    Exit,
    RefusedError,
    err,
    examples,
    expected_failures,
    fail,
    out,
)
from postbus.process.local_bus import Announcement, bus_of_data_directory

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

CODES: Final = """
[bold]Exit codes[/bold]
  0 written, even if parts are missing, 2 usage, 3 settings or contexts,
  5 the file cannot be written, 130 interrupted
"""
EPILOG: Final = examples(
    "postbus report                            to a file named after the time",
    "postbus report case-7.tar.gz --log bus.log",
    "journalctl -u postbus -n 1000 | postbus report --log -",
    "postbus report --context prod --metrics http://10.0.0.7:9464/metrics",
    "kubectl exec postbus-0 -- postbus report - > report.tar.gz",
    codes=CODES,
)
PART_S: Final = 60.0
"""Limit for each part, so that a bus that does not answer does not hold up the rest."""

AUDIT_ENTRIES: Final = 200
LOG_LINES: Final = 1_000
LOG_BYTES: Final = 1024 * 1024
STDIO: Final = Path("-")
HIDDEN: Final = "***"
SECRETS: Final = (
    (re.compile(r"(SharedAccess(?:Key|Signature)\s*=\s*)[^;\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\bsig=)[^&\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(\bBearer\s+)[^\s\"']+", re.IGNORECASE), r"\1***"),
    (re.compile(r"(://[^\s/@:]*):\S{0,2000}@"), r"\1:***@"),
    (
        re.compile(r"(password[\"']?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s&;]+)", re.IGNORECASE),
        r"\1***",
    ),
    (re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{43}="), HIDDEN),  # 32 bytes: a key
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]*"), r"\1***"),
)


@dataclass(slots=True)
class Report:
    """The collected parts by file name, and the missing ones with reasons."""

    known_secrets: list[str] = field(repr=False)
    parts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    async def collect(self, name: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Add a part, or the reason why it is missing."""
        try:
            async with asyncio.timeout(PART_S):
                self.parts[name] = await work()
        except RefusedError as error:
            self.missing[name] = str(error)
        except TimeoutError:
            self.missing[name] = f"incomplete after {PART_S:.0f} s"

    def archive(self, folder: str) -> bytes:
        """Return all parts as .tar.gz without secrets: text unchanged, anything else as JSON."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, part in self.parts.items():
                clean = self.without_secrets(part)
                if not isinstance(clean, str):
                    clean = json.dumps(clean, indent=1, ensure_ascii=False) + "\n"
                content = clean.encode("utf-8", "replace")
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
                archive.addfile(member, io.BytesIO(content))
        return packed.getvalue()

    def without_secrets(self, value: Any) -> Any:
        """Return JSON or text with everything masked that is or looks like a secret."""
        if isinstance(value, dict):
            return {key: self.without_secrets(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.without_secrets(each) for each in value]
        if not isinstance(value, str):
            return value
        for secret in self.known_secrets:
            value = value.replace(secret, HIDDEN)
        for pattern, shown in SECRETS:
            value = pattern.sub(shown, value)
        return value


def report(
    file: Annotated[
        Path | None, typer.Argument(help="The .tar.gz to write; - is standard output.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Log file of the bus; - is standard input.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Metrics of a bus on another machine.", metavar="URL"),
    ] = None,
    context: ContextName = None,
) -> None:
    """Collect diagnostics for support in a .tar.gz, without keys, tokens and passwords."""
    if file == STDIO and sys.stdout.isatty():
        raise typer.BadParameter("cannot write the archive to a terminal: name a file")
    with expected_failures():
        target = find_target(context)
        name = time.strftime("postbus-report-%Y%m%dT%H%M%SZ", time.gmtime())
        made = make_report(target, log, metrics)
        _write(file or Path(f"{name}.tar.gz"), made.archive(name))
        for part, reason in made.without_secrets(made.missing).items():
            err.print(f"missing: {part}: {reason}", markup=False)


def make_report(target: BusAddress, log: Path | None, metrics: str | None) -> Report:
    """Collect from the bus, and from this machine if the bus runs on it."""
    from postbus.cli.client.control_client import run_with

    made = Report(_known_secrets(target))
    announced = _announced(target)
    metrics = metrics or (announced.metrics if announced else None)
    made.parts["about.json"] = {
        "postbus": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "context": target.name,
        "control": target.context.control,
        "metrics": metrics,
        "missing": made.missing,
    }
    for part, work in (
        ("settings.json", lambda: _settings_of(announced)),
        ("log.txt", lambda: _log(log, announced)),
    ):
        try:
            made.parts[part] = work()
        except OSError as error:
            made.missing[part] = f"{error.filename or log}: {error.strerror}"
        except RefusedError as error:
            made.missing[part] = str(error)
    asyncio.run(made.collect("metrics.txt", lambda: _metrics(metrics)))
    try:
        run_with(target, lambda control: _ask(control, made))
    except ContextError as error:
        made.missing["all of the control API"] = str(error)
    return made


def _known_secrets(target: BusAddress) -> list[str]:
    """Return the credentials of the bus that this command knows."""
    from postbus.cli.client.connection_strings import read_connection_string

    found: list[str | None] = []
    for read in (target.token, lambda: read_connection_string(target.connection_string()).key):
        try:
            found.append(read())
        except ContextError:  # then no part can contain it
            continue
    return [each for each in found if each]


def _announced(target: BusAddress) -> Announcement | None:
    """Return the announcement of this machine's bus, if it is the target."""
    from postbus.process.settings import load_settings

    found = bus_of_data_directory(load_settings().data)
    return found if found is not None and found.control == target.context.control else None


def _write(file: Path, content: bytes) -> None:
    from postbus.process.private_file import write_private

    if file == STDIO:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        write_private(file, content)
    except OSError as error:
        fail(f"{file}: {error.strerror}", Exit.MACHINE)
    out.print(f"wrote {file}; it names entities and clients: check it before you send it",
              markup=False)  # fmt: skip


# --- from the control API -----------------------------------------------------------------------


async def _ask(control: ControlClient, made: Report) -> None:
    entities: list[dict[str, Any]] = []
    await asyncio.gather(
        made.collect("status.json", lambda: control.get("/v1/status")),
        made.collect("namespace.json", lambda: control.get("/v1/namespace")),
        made.collect("connections.json", lambda: control.all_of("/v1/connections")),
        made.collect("audit.json", lambda: control.get("/v1/audit", top=AUDIT_ENTRIES)),
        made.collect("entities.json", lambda: _entities(control, entities)),
    )
    if entities:  # also entities before one that failed
        made.parts["entities.json"] = entities


async def _entities(control: ControlClient, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add every entity with its counts to `found` and return it."""
    from postbus.cli.client.control_client import part

    for kind in ("queues", "topics"):
        for each in await control.all_of(f"/v1/{kind}"):
            path = f"/v1/{kind}/{part(each['name'])}"
            found.append({"kind": kind[:-1], **each, "runtime": await _runtime(control, path)})
            if kind == "topics":
                for one in await control.all_of(f"{path}/subscriptions"):
                    below = f"{path}/subscriptions/{part(one['name'])}"
                    counts = await _runtime(control, below)
                    found.append({"kind": "subscription", **one, "runtime": counts})
    return found


async def _runtime(control: ControlClient, path: str) -> Any:
    try:
        return await control.get(f"{path}/runtime")
    except RefusedError as error:  # its partition is unavailable: continue with the others
        return {"missing": str(error)}


async def _metrics(url: str | None) -> str:
    import aiohttp

    if url is None:
        raise RefusedError(
            "their address is only known on the machine of the bus: use --metrics URL"
        )
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, ValueError) as error:
        raise RefusedError(f"{url}: {error}") from None


# --- from this machine --------------------------------------------------------------------------


def _settings_of(announced: Announcement | None) -> dict[str, Any]:
    """Return the settings of the process of the bus; raises OSError, `RefusedError`."""
    from postbus.process.settings import PREFIX, Settings

    process = _process_of(announced)
    variables = dict(each.partition("=")[::2] for each in _words(process / "environ"))
    given = {name.upper(): value for name, value in variables.items()}
    return {
        "commandLine": _words(process / "cmdline"),
        "variables": {
            name: given[name]
            for name in (PREFIX + each.upper() for each in Settings.model_fields)
            if name in given
        },
    }


def _process_of(announced: Announcement | None) -> Path:
    """Return the /proc folder of the process of the bus; raises OSError, `RefusedError`."""
    if announced is None:
        raise RefusedError("only available on the machine of the bus, with its POSTBUS_DATA")
    process = Path(f"/proc/{announced.pid}")
    if not any("postbus" in word for word in _words(process / "cmdline")):
        raise RefusedError(f"process {announced.pid} is no longer a bus")
    return process


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").rstrip("\0").split("\0")


def _log(log: Path | None, announced: Announcement | None) -> str:
    """Return the last lines of the log; raises OSError, `RefusedError`."""
    if log == STDIO:
        return _tail(sys.stdin.buffer)
    if log is None:
        hint = "use --log FILE, or a pipe with --log -"
        if announced is None:
            raise RefusedError(hint)
        log = _process_of(announced) / "fd" / "2"
        if not stat.S_ISREG(log.stat().st_mode):
            raise RefusedError(f"the bus does not log to a file: {hint}")
    with log.open("rb") as stream:
        return _tail(stream)


def _tail(stream: BinaryIO) -> str:
    """Return the last complete lines: in a partial one a secret might not be recognized."""
    start = 0
    if stream.seekable():
        start = max(0, stream.seek(0, os.SEEK_END) - LOG_BYTES)
        stream.seek(start)
    kept, is_cut = b"", start > 0
    while chunk := stream.read(LOG_BYTES):
        kept += chunk
        is_cut = is_cut or len(kept) > LOG_BYTES
        kept = kept[-LOG_BYTES:]
    if is_cut:
        kept = kept.partition(b"\n")[2]
    return "\n".join(kept.decode("utf-8", "replace").splitlines()[-LOG_LINES:]) + "\n"
