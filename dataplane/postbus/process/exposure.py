"""Checks for exposed settings: files of keys, and the connection to Postgres.

Run once, at the start. Users who may change a file of keys control the bus, so that is refused; a
file that they may only read gives a remark. A file of root that a group may read is in order, as in
Postgres: Kubernetes mounts Secrets like that for processes that are not root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from postbus.process.settings import Settings, SettingsError, is_loopback

KEY_FILES: Final = ("tls_key_file", "sealing_key_file", "control_token_file", "stores_file")
VERIFIED: Final = frozenset({"verify-ca", "verify-full"})


def exposures(settings: Settings, default_ssl_mode: str = "") -> list[str]:
    """Return a remark for each exposed setting; raises `SettingsError`.

    `default_ssl_mode`: the mode of Postgres clients where an address gives none (PGSSLMODE).
    """
    remarks = []
    for name in KEY_FILES:
        file: Path | None = getattr(settings, name)
        if file is not None and (remark := _look_at(name, file)):
            remarks.append(remark)
    dsns = settings.store_dsns
    for number, dsn in enumerate(dsns, 1):
        hosts = _unverified_hosts(dsn, default_ssl_mode)
        if hosts:
            which = f" {number}" if len(dsns) > 1 else ""
            remarks.append(
                f"database{which} on {', '.join(hosts)} is reached without verified TLS: anybody"
                " on the network path can read and change messages; add ?sslmode=verify-full and"
                " sslrootcert"
            )
    return remarks


def _look_at(name: str, file: Path) -> str:
    """Return a remark about a file of keys, "" when only its owner has access."""
    try:
        found = file.stat()
    except OSError:
        return ""  # reported where the address is used
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(f"{name}: others may change {file}: chmod 600 {file}")
    is_shared_by_root = found.st_uid == 0 and os.geteuid() != 0
    if mode & (stat.S_IROTH if is_shared_by_root else stat.S_IRGRP | stat.S_IROTH):
        return f"{name}: others may read {file}: chmod 600 {file}"
    return ""


def _unverified_hosts(dsn: str, default_ssl_mode: str) -> list[str]:
    """Return the hosts of an address that are reached over a network without a verified
    certificate.
    """
    try:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
    except ValueError:
        return []  # reported where the address is used
    if query.get("sslmode", [default_ssl_mode])[-1] in VERIFIED:
        return []
    named = parts.netloc.rpartition("@")[2].split(",") + query.get("host", [])
    hosts = [_without_port(each) for each in named]
    return [host for host in hosts if host and not host.startswith("/") and not is_loopback(host)]


def _without_port(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.replace("%2F", "/").replace("%2f", "/").partition(":")[0]
