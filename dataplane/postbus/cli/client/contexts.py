"""The bus that a command talks to: stored contexts and the selected one.

The context file may contain keys, so only its owner may read it. Nothing here opens a connection.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from postbus.cli.failures import ContextError, InputError, examples, expected_failures, out
from postbus.cli.formats.output import Format, OutputFormat, print_objects
from postbus.process.local_bus import bus_at_control_port, bus_of_data_directory
from postbus.process.private_file import write_private

if TYPE_CHECKING:
    from collections.abc import Mapping

    from postbus.process.settings import Settings

DEFAULT: Final = "default"
"""Name of the bus of `postbus dev` in this folder, which is not stored."""

NO_BUS_HERE: Final = (
    "no bus of postbus dev runs in this folder: go to the folder where it runs, or start one"
)
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
KEY: Final = re.compile(r"(SharedAccess(?:Key|Signature)\s*=\s*)[^;]+", re.IGNORECASE)
SCHEMES: Final = ("http", "https")


@dataclass(frozen=True, slots=True)
class Context:
    """A stored bus. `control` is a URL; files are read when needed."""

    control: str | None = None
    token_file: str | None = None
    ca_file: str | None = None
    connection_string: str | None = field(default=None, repr=False)
    connection_string_file: str | None = None


@dataclass(frozen=True, slots=True)
class BusAddress:
    """Addresses of a bus for a command. `origin` says how it was found, for messages."""

    context: Context
    name: str
    origin: str
    is_guess: bool = False
    """No bus was specified: none runs in this folder and no context is selected."""
    endpoint: str | None = None
    """AMQP address announced by the bus itself: a connection string without a key."""

    @property
    def control(self) -> str:
        """The control API's URL; raises `ContextError`."""
        if self.context.control is None:
            raise ContextError(
                f"the context {self.name} has no control API: set it with"
                f" postbus context set {self.name} --control URL"
            )
        return self.context.control.rstrip("/")

    def token(self) -> str | None:
        """Read the bearer token; raises `ContextError`."""
        path = self.context.token_file
        if path is None:
            return None
        return _first_line(Path(path), "token file", is_first_of=True).split()[-1]

    def connection_string(self) -> str:
        """Return the connection string for AMQP; raises `ContextError`."""
        context = self.context
        if context.connection_string is not None:
            return context.connection_string
        if context.connection_string_file is not None:
            return _first_line(Path(context.connection_string_file), "connection string file")
        if self.is_guess:
            raise ContextError(
                f"{NO_BUS_HERE}; for another bus set POSTBUS_CONNECTION_STRING, or store one with"
                " postbus context set NAME --connection-string-file FILE"
            )
        raise ContextError(
            f"no connection string for {self.origin}: set POSTBUS_CONNECTION_STRING to the output"
            " of postbus connection-string, or store one with postbus context set NAME"
            " --connection-string-file FILE"
        )


def _first_line(path: Path, what: str, *, is_first_of: bool = False) -> str:
    """Return the only line of a file; `is_first_of`: the first of several, skipping comments.

    Raises `ContextError`.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ContextError(f"{what} {path}: {reason.lower()}") from None
    lines = [line.strip() for line in text.splitlines()]
    if is_first_of:
        text = next((line for line in lines if line and not line.startswith("#")), "")
    if not text or "\n" in text:
        raise ContextError(f"{what} {path}: must have exactly one line")
    return text


# --- the file -----------------------------------------------------------------------------------


@dataclass(slots=True)
class ContextFile:
    """All contexts of a user and the selected one, None for the default."""

    path: Path
    contexts: dict[str, Context]
    current: str | None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> ContextFile:
        """Read the file; a missing one is empty. Raises `ContextError`."""
        path = config_folder(os.environ if environ is None else environ) / "contexts.json"
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            contexts = {str(name): _read_context(each) for name, each in held["contexts"].items()}
            current = held.get("current")
            if current is not None and current not in contexts:
                current = None
            return cls(path, contexts, current)
        except FileNotFoundError:
            return cls(path, {}, None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or "damaged: fix or remove it"
            raise ContextError(f"{path}: {reason}") from None

    def save(self) -> None:
        """Write the file, readable by its owner only; raises `ContextError`."""
        held = {
            "current": self.current,
            "contexts": {
                name: {key: value for key, value in asdict(each).items() if value is not None}
                for name, each in sorted(self.contexts.items())
            },
        }
        try:
            write_private(self.path, (json.dumps(held, indent=1) + "\n").encode())
        except OSError as error:
            raise ContextError(f"{self.path}: {error.strerror}") from None

    def find(self, name: str) -> Context:
        """Return a context; raises `ContextError`."""
        if name not in self.contexts:
            known = ", ".join([DEFAULT, *sorted(self.contexts)])
            raise ContextError(f"no context {name}; existing contexts: {known}")
        return self.contexts[name]


def config_folder(environ: Mapping[str, str]) -> Path:
    """Return the configuration folder. Source: XDG Base Directory Specification."""
    given = environ.get("XDG_CONFIG_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".config"
    return base / "postbus"


def _read_context(held: dict[str, Any]) -> Context:
    known = {each.name for each in fields(Context)}
    values = {key: value for key, value in held.items() if key in known}
    if not all(isinstance(value, str) for value in values.values()):
        raise ValueError("values must be text")
    return Context(**values)


# --- selecting ----------------------------------------------------------------------------------


def find_target(
    name: str | None = None,
    *,
    control_port: int | None = None,
    connection_string: str | None = None,
) -> BusAddress:
    """Return the bus for a command; raises `ContextError` and `SettingsError`.

    In this order: the named context, the context selected with `context use`, the bus that `postbus
    dev` runs on this folder's data directory, the bus on the default control port. Other arguments
    override values of the context.
    """
    from postbus.process.settings import load_settings

    file = ContextFile.load()
    name = name or file.current or DEFAULT
    settings = load_settings(control_port=control_port)
    if name != DEFAULT:
        target = BusAddress(file.find(name), name, f"context {name}")
    else:
        announced = bus_of_data_directory(settings.data)
        if announced is not None:
            found = Context(
                announced.control,
                announced.token_file,
                announced.ca_file,
                announced.connection_string,
            )
            origin = f"the bus of {settings.data}"
            target = BusAddress(found, DEFAULT, origin, endpoint=announced.endpoint)
        else:
            where = f"http://127.0.0.1:{settings.control_port}"
            target = BusAddress(
                Context(where, _token_of(settings)), DEFAULT, f"the bus at {where}", is_guess=True
            )
    context = target.context
    if "control_port" in settings.model_fields_set and (control_port or name == DEFAULT):
        where = f"http://127.0.0.1:{settings.control_port}"
        if context.control not in {where, where.replace("127.0.0.1", "localhost")}:
            context = replace(context, control=where, token_file=_token_of(settings), ca_file=None)
    if connection_string:
        context = replace(context, connection_string=connection_string)
    return replace(target, context=context)


def _token_of(settings: Settings) -> str | None:
    """Return the token file in the settings, or that of the bus on their port."""
    if settings.control_token_file is not None:
        return str(settings.control_token_file)
    found = bus_at_control_port(settings.control_port)
    return None if found is None else found.token_file


def context_names() -> list[str]:
    """Return the names of contexts for completion; never raises."""
    try:
        return [DEFAULT, *sorted(ContextFile.load().contexts)]
    except ContextError:
        return [DEFAULT]


ContextName = Annotated[
    str | None,
    typer.Option(
        "--context",
        "-C",
        envvar="POSTBUS_CONTEXT",
        help="Context of the bus; see postbus context list.",
        metavar="NAME",
        autocompletion=context_names,
        show_envvar=False,
    ),
]
ConnectionString = Annotated[
    str | None,
    typer.Option(
        "--connection-string",
        envvar="POSTBUS_CONNECTION_STRING",
        help="Connection string for AMQP. POSTBUS_CONNECTION_STRING or a context are safer, since"
        " other users of this machine can see the options of a command.",
        metavar="TEXT",
        show_envvar=False,
        show_default=False,
    ),
]


# --- commands -----------------------------------------------------------------------------------

EPILOG: Final = examples(
    "postbus context list                 all contexts; * is in use",
    "postbus context set prod --control https://bus:9465 --token-file token.txt",
    "postbus context set prod --ca-file ca.pem --connection-string-file prod.txt",
    "postbus context use prod             use it for all commands",
    "postbus context use default          back to the bus in this folder",
    "postbus status --context prod        use it for one command",
    "postbus context show prod -o json",
    "postbus context delete prod",
)

context = typer.Typer(
    help="Select the bus that commands talk to.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="Name of a context.", autocompletion=context_names)]


@context.command("list", epilog=EPILOG)
def list_contexts(output: OutputFormat = Format.TABLE) -> None:
    """List the contexts; keys are not shown."""
    with expected_failures():
        file = ContextFile.load()
        current = file.current or DEFAULT
        rows = [
            {"current": name == current, "name": name, **shown(each)}
            for name, each in [
                (DEFAULT, find_target(DEFAULT).context),
                *sorted(file.contexts.items()),
            ]
        ]
        columns = {"current": "", "name": "name", "control": "control", "amqp": "amqp"}
        print_objects(rows, output, columns)


@context.command(epilog=EPILOG)
def show(
    name: Annotated[
        str | None, typer.Argument(help="Name of a context; default: the one in use.")
    ] = None,
    output: OutputFormat = Format.TABLE,
) -> None:
    """Show one context; keys are not shown."""
    with expected_failures():
        target = find_target(name)
        print_objects(
            {"name": target.name, "origin": target.origin, **shown(target.context)}, output
        )


@context.command(epilog=EPILOG)
def use(name: Name) -> None:
    """Use this context for all commands from now on."""
    with expected_failures():
        file = ContextFile.load()
        if name != DEFAULT:
            file.find(name)
        file.current = None if name == DEFAULT else name
        file.save()
        out.print(f"commands now use {name}", markup=False)


@context.command("set", epilog=EPILOG)
def set_context(
    name: Name,
    control: Annotated[
        str | None, typer.Option("--control", help="URL of the control API.", metavar="URL")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the bearer token.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="Trusted certificates (PEM).")
    ] = None,
    connection_string_file: Annotated[
        Path | None,
        typer.Option(
            "--connection-string-file",
            help="File with the connection string for AMQP; - reads it from standard input and"
            " stores it.",
        ),
    ] = None,
) -> None:
    """Store a context, or change the given values of one; empty text removes a value."""
    with expected_failures():
        if NAME.fullmatch(name) is None or name == DEFAULT:
            raise typer.BadParameter(
                "a context's name has up to 63 letters, digits and . - _; default is reserved"
            )
        file = ContextFile.load()
        changes: dict[str, str | None] = {}
        if control is not None:
            changes["control"] = _checked_url(control) if control else None
        for key, path in (("token_file", token_file), ("ca_file", ca_file)):
            if path is not None:
                changes[key] = _checked_file(path)
        if connection_string_file is not None:
            changes |= _checked_connection_string(connection_string_file)
        file.contexts[name] = replace(file.contexts.get(name, Context()), **changes)
        file.save()
        out.print(f"stored {name} in {file.path}", markup=False)


@context.command(epilog=EPILOG)
def delete(name: Name) -> None:
    """Delete a context, but not the files that it names."""
    with expected_failures():
        file = ContextFile.load()
        file.find(name)
        del file.contexts[name]
        file.current = None if file.current == name else file.current
        file.save()
        out.print(f"deleted {name}", markup=False)


def shown(context: Context) -> dict[str, Any]:
    """Return a context for output, without keys."""
    text = context.connection_string
    return {
        "control": context.control,
        "tokenFile": context.token_file,
        "caFile": context.ca_file,
        "amqp": KEY.sub(r"\1***", text) if text else context.connection_string_file,
    }


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        is_good &= not (parts.query or parts.fragment or parts.username or parts.password)
    except ValueError:
        is_good = False
    if not is_good:
        raise typer.BadParameter("--control: use http://host:port or https://host:port")
    return text.rstrip("/")


def _checked_file(path: Path) -> str | None:
    if not path.name:  # Path("") is "."
        return None
    if not path.expanduser().is_file():
        raise InputError(f"{path}: no such file")
    return str(path.expanduser().absolute())


def _checked_connection_string(path: Path) -> dict[str, str | None]:
    from postbus.cli.client.connection_strings import read_connection_string

    if str(path) == "-":
        text = typer.get_text_stream("stdin").read().strip()
        read_connection_string(text)
        return {"connection_string": text, "connection_string_file": None}
    stored = _checked_file(path)
    if stored is not None:
        read_connection_string(_first_line(Path(stored), "connection string file"))
    return {"connection_string": None, "connection_string_file": stored}
