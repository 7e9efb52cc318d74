"""Settings of one broker process, read once and passed on as arguments.

`load_settings` merges options of the command line with `POSTBUS_…` variables of the environment;
the command line wins. No other module reads the environment. docs/guides/settings.md describes the
same fields; a test compares both.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from postbus.process.stores_file import SCHEMES, read_stores_file

PREFIX = "POSTBUS_"
ANY_ADDRESS = ("0.0.0.0", "::")


class SettingsError(Exception):
    """The settings cannot be used."""


class Settings(BaseSettings):
    """All settings of a broker process."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    data: Path = Path(".postbus")
    """Folder of generated keys, certificates and the embedded Postgres. Only one process may use
    it at a time. Default: `.postbus` below the current folder, so that each project has its own."""

    stores: SecretStr | None = None
    """Address of Postgres, `postgresql://user:password@host/database`. Several are separated by
    spaces, and their order must never change. Direct connections: a transaction pooler would break
    the ownership of partitions. Default: none, `serve` needs it."""

    stores_file: Path | None = None
    """File with these addresses instead of `stores`, one a line; `#` begins a comment. It is read
    again when a connection cannot be opened, so that a changed password needs no restart. Default:
    none."""

    broker_name: str = Field("broker-0", min_length=1, max_length=63)
    """Name of this broker, unique in its namespace. A process with the same name takes partitions
    over at once from one that has ended on this machine, otherwise after 3 seconds of silence, a
    process with another name after 5. Only the owner of partition 0 changes definitions. Default:
    broker-0."""

    host: str = "127.0.0.1"
    """Address to listen on. Default: loopback only; `0.0.0.0` is every IPv4 interface."""

    port: int = Field(5672, ge=0, le=65_535)
    """Port without TLS, which the SDKs use with `UseDevelopmentEmulator=true`: AMQP, and HTTP as on
    `http_port`. 0 takes any free port. Default: 5672, the registered one of AMQP."""

    is_plain_enabled: bool | None = None
    """Listen without TLS. Default: only if `host` is loopback, since keys would cross the network
    in clear text."""

    tls_port: int = Field(5671, ge=0, le=65_535)
    """Port of TLS: AMQP, and HTTP as on `http_port`. 0 takes any free port. Default: 5671, the
    registered one of AMQP and the only one that all SDKs accept with TLS."""

    is_tls_enabled: bool = True
    """Listen with TLS. Default: yes."""

    tls_certificate_file: Path | None = None
    """Certificate chain in PEM form; a new one is used within seconds. Default: one signed by the
    authority in `data`."""

    tls_key_file: Path | None = None
    """Private key of that certificate in PEM form. Default: see `tls_certificate_file`."""

    sealing_key_file: Path | None = None
    """Key that seals the SAS keys in the store: base64 of 32 random bytes, as from `openssl rand
    -base64 32`. Keep it with the backups: without it the keys of rules created at run time
    cannot be read. Default: one that is generated in `data`."""

    tls_names: str = ""
    """Additional host names and addresses of the bus, separated by commas: named by the generated
    certificate, valid in tokens for a bare host, and accepted in requests on loopback. Default:
    none; `localhost`, the machine's name and loopback addresses are always names of the bus."""

    http_port: int = Field(5300, ge=0, le=65_535)
    """Port of HTTP: administration, messages, `/health`, AMQP over WebSocket. The first byte tells
    TLS from plain; plain only if `port` is open, too. 0 takes any free port. Default: 5300, as in
    the official emulator."""

    metrics_port: int = Field(9464, ge=0, le=65_535)
    """Port of `/metrics`, `/healthz` and `/readyz`. 0 takes any free port. Default: 9464, as in
    OpenTelemetry's Prometheus exporter."""

    metrics_host: str = "127.0.0.1"
    """Address of that port. Default: loopback; metrics name queues and need no key."""

    is_metrics_enabled: bool = True
    """Serve metrics and health. Default: yes."""

    is_tracing_enabled: bool = False
    """Send spans of traced messages to OpenTelemetry; needs the extra `tracing`. The target is in
    its own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT. Default: no."""

    control_port: int = Field(9465, ge=0, le=65_535)
    """Port of the control API, which the command line, CI and the operator use. 0 takes any free
    port. Default: 9465, beside the metrics."""

    control_host: str = "127.0.0.1"
    """Address of that port. Default: loopback; any other address needs TLS."""

    is_control_enabled: bool = True
    """Serve the control API. Default: yes."""

    is_control_tls_enabled: bool | None = None
    """Serve the control API with TLS, with the certificate of `tls_certificate_file`. Default: only
    when `control_host` is not loopback, or if callers may present certificates."""

    control_token_file: Path | None = None
    """File of tokens for callers of the control API, one per line, of at least 20 characters. It is
    read again when it changes. Default: one that is generated in `data`."""

    control_client_ca_file: Path | None = None
    """CA certificate, PEM, whose client certificates authenticate callers of the control API, too.
    Default: none, tokens only."""

    window_bytes: int = Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Memory for messages that are ready to be delivered, in bytes, shared by all partitions. Other
    messages stay in Postgres and are read when needed. Default: 256 MiB."""

    is_unsafe: bool = False
    """Accept a Postgres that may lose accepted messages in a power cut (`fsync` or
    `synchronous_commit` off), and run the embedded one that way. Default: no."""

    commits: Literal["pipelined", "statements"] = "pipelined"
    """Way to commit several plain messages: one message to Postgres with a COPY, or statements of
    the driver, at more CPU. Default: pipelined."""

    accelerate: Literal["auto", "off", "require"] = "auto"
    """Use of functions in C for bursts: if this installation has them, never, or required, so that
    the broker does not start without them. Read from the environment. Default: auto."""

    grace_s: float = Field(10.0, ge=0, le=3_600)
    """Seconds that a stop waits for clients before it closes their connections. Accepted messages
    are safe in any case. Default: 10."""

    log_format: Literal["human", "json"] = "human"
    """Format of log lines on standard error. Default: human; use json in containers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log lines. Default: info. Debug logs every frame."""

    @property
    def store_dsns(self) -> list[str]:
        """Addresses in `stores` or, as of now, in `stores_file`; raises `SettingsError`."""
        if self.stores_file is not None:
            try:
                return read_stores_file(self.stores_file)
            except ValueError as error:
                raise SettingsError(str(error)) from None
        return [] if self.stores is None else self.stores.get_secret_value().split()

    @property
    def has_stores(self) -> bool:
        """True if addresses of databases are given."""
        return self.stores is not None or self.stores_file is not None

    @property
    def dialled_names(self) -> list[str]:
        """Host names and addresses of the bus for clients, beside loopback's."""
        names = [name.strip() for name in self.tls_names.split(",") if name.strip()]
        if self.host not in ANY_ADDRESS:
            names.append(self.host)
        return [socket.gethostname(), *names]

    @property
    def listens_plain(self) -> bool:
        """True if the bus listens without TLS, with the default of `is_plain_enabled`."""
        return is_loopback(self.host) if self.is_plain_enabled is None else self.is_plain_enabled

    @property
    def is_control_tls(self) -> bool:
        """True if the control API uses TLS, with the default of `is_control_tls_enabled`."""
        if self.is_control_tls_enabled is not None:
            return self.is_control_tls_enabled
        return not is_loopback(self.control_host) or self.control_client_ca_file is not None

    def validate_together(self) -> None:
        """Refuse fields that contradict each other; raises `SettingsError`."""
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise SettingsError("tls_certificate_file and tls_key_file need each other")
        if self.stores is not None and self.stores_file is not None:
            raise SettingsError(
                "POSTBUS_STORES and POSTBUS_STORES_FILE exclude each other: unset one of them"
            )
        if self.stores is not None and not (
            self.store_dsns and all(dsn.startswith(SCHEMES) for dsn in self.store_dsns)
        ):
            raise SettingsError("POSTBUS_STORES: each address must begin with postgresql://")
        if not self.listens_plain and not self.is_tls_enabled:
            raise SettingsError(
                "neither plain nor TLS connections are enabled: no client could connect"
            )
        if self.is_control_enabled and not self.is_control_tls:
            if not is_loopback(self.control_host):
                raise SettingsError(
                    f"control_host is {self.control_host}: tokens would be sent in clear text,"
                    " so is_control_tls_enabled must not be false"
                )
            if self.control_client_ca_file is not None:
                raise SettingsError("control_client_ca_file needs TLS: enable it")
        ports = [("port", self.port)] if self.listens_plain else []
        ports += [("tls_port", self.tls_port)] if self.is_tls_enabled else []
        ports += [("http_port", self.http_port)]
        ports += [("metrics_port", self.metrics_port)] if self.is_metrics_enabled else []
        ports += [("control_port", self.control_port)] if self.is_control_enabled else []
        for at, (name, port) in enumerate(ports):
            for other, taken in ports[:at]:
                if port and port == taken:
                    raise SettingsError(f"{name} and {other} are both {port}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(**options: Any) -> Settings:
    """Return the settings of the environment, overridden by arguments that are not None.

    Raises `SettingsError` with one line for each mistake, named as the user wrote it.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if any(_has_password(dsn) for dsn in str(given.get("stores", "")).split()):
        raise SettingsError(
            "--stores: other users of this machine can see a password on the command line: set"
            " POSTBUS_STORES_FILE or POSTBUS_STORES instead"
        )
    try:
        settings = Settings(**given)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False, include_input=False):
            name = str(problem["loc"][0]) if problem["loc"] else ""
            shown = f"--{name.replace('_', '-')}" if name in given else PREFIX + name.upper()
            message = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{shown}: {message[:1].lower()}{message[1:]}")
        raise SettingsError("\n".join(lines)) from None
    except Exception as error:  # noqa: BLE001 sources raise errors of any class
        raise SettingsError(str(error)) from None
    settings.validate_together()
    return settings


def _has_password(dsn: str) -> bool:
    try:
        parts = urlsplit(dsn)
        return bool(parts.password) or "password" in parse_qs(parts.query)
    except ValueError:
        return "@" in dsn


def default_ssl_mode() -> str:
    """Return the TLS mode of Postgres clients for an address that gives none."""
    return os.environ.get("PGSSLMODE", "")


def unknown_variables(names: Iterable[str] | None = None) -> list[str]:
    """Return a warning for each variable of the environment that looks like a misspelt setting.

    They are no errors: Kubernetes sets `POSTBUS_SERVICE_HOST` and others for a service `postbus`.
    """
    names = os.environ if names is None else names
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    remarks = []
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in known and "SERVICE" not in name:
            close = difflib.get_close_matches(name, known, 1, 0.85)
            remarks += [f"{name} is not a setting; did you mean {close[0]}?"] if close else []
    return remarks
