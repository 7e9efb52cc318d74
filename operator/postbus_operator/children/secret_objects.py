"""Secrets of a bus, from values that exist or were just made; and the file of databases."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from postbus_operator.annotations import WATCH_LABEL
from postbus_operator.certificates import BUNDLE
from postbus_operator.children.broker import KEY_FILE, STORES, STORES_FILE, TOKEN_FILE
from postbus_operator.children.bus import BROKER, POSTGRES_PORT, STORE, Bus, Json
from postbus_operator.children.store import DATABASE, PASSWORD_FILE, USER

TLS_TYPE: Final = "kubernetes.io/tls"
BUS_CA_FILE: Final = "bus-ca.crt"
SCHEMES: Final = ("postgresql://", "postgres://")


class AddressInvalid(Exception):
    """An address of a database cannot be used; the text does not contain it."""


def sealing_key(bus: Bus, key: bytes) -> Json:
    """Return the Secret that lives as long as the keys of rules in the databases."""
    return _secret(bus, bus.child("sealing-key"), BROKER, {KEY_FILE: key}, outlives=True)


def control_token(bus: Bus, token: bytes) -> Json:
    """Return the Secret with the operator's token for the control API."""
    return _secret(bus, bus.child("control-token"), BROKER, {TOKEN_FILE: token})


def authority(bus: Bus, data: Mapping[str, bytes]) -> Json:
    """Return the Secret of the bus's authority, which clients trust longer than a resource."""
    return _secret(bus, bus.child("ca"), BROKER, data, type=TLS_TYPE, outlives=True)


def broker_certificate(bus: Bus, data: Mapping[str, bytes]) -> Json:
    """Return the Secret with the certificate of the brokers."""
    return _secret(bus, bus.child("tls"), BROKER, data, type=TLS_TYPE)


def store_certificate(bus: Bus, store: str, data: Mapping[str, bytes]) -> Json:
    """Return the Secret with the certificate of a managed store."""
    return _secret(bus, f"{bus.store(store)}-tls", STORE, data, type=TLS_TYPE)


def store_password(bus: Bus, store: str, password: bytes) -> Json:
    """Return the Secret with a managed store's password, which lives as long as its volume."""
    name = f"{bus.store(store)}-auth"
    return _secret(bus, name, STORE, {PASSWORD_FILE: password}, outlives=True)


def stores_file(
    bus: Bus,
    passwords: Mapping[str, str],
    addresses: Mapping[str, str],
    authorities: Mapping[str, bytes],
    bus_authority: bytes,
) -> Json:
    """Return the Secret with POSTBUS_STORES_FILE and the certificates that it names.

    `passwords` of managed stores, `addresses` and, if given, `authorities` of the others. Raises
    `AddressInvalid`.
    """
    lines = ["# Written by the operator. The order of the databases is fixed."]
    data = {BUS_CA_FILE: bus_authority}
    for store in bus.spec.operator_spec.storage.stores:
        if store.postgres is None:
            login = f"{USER}:{quote(passwords[store.name], safe='')}"
            host = bus.host(bus.store(store.name))
            lines.append(
                f"postgresql://{login}@{host}:{POSTGRES_PORT}/{DATABASE}"
                f"?sslmode=verify-full&sslrootcert={STORES}/{BUS_CA_FILE}"
            )
            continue
        ca_file = None
        if store.name in authorities:
            name = f"store-{store.name}-{BUNDLE}"
            data[name] = authorities[store.name]
            ca_file = f"{STORES}/{name}"
        lines.append(with_tls(addresses[store.name], store.postgres.ssl_mode, ca_file))
    data[STORES_FILE] = "".join(f"{line}\n" for line in lines).encode()
    return _secret(bus, bus.child("stores"), BROKER, data)


def with_tls(address: str, ssl_mode: str | None, ca_file: str | None) -> str:
    """Return an address with a mode of TLS and a file of authorities; raises `AddressInvalid`.

    A file without any mode means verify-full.
    """
    address = address.strip()
    try:
        parts = urlsplit(address)
        asked = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise AddressInvalid from None
    is_one = address.startswith(SCHEMES) and len(address.split()) == 1
    if not is_one or not address.isprintable() or parts.fragment or parts.netloc.count("@") > 1:
        raise AddressInvalid
    wanted = {} if ssl_mode is None else {"sslmode": ssl_mode}
    if ca_file is not None:
        wanted["sslrootcert"] = ca_file
        if "sslmode" not in wanted and "sslmode" not in dict(asked):
            wanted["sslmode"] = "verify-full"
    if not wanted:
        return address
    kept = [each for each in asked if each[0] not in wanted]
    start = address.partition("?")[0]
    return f"{start}?{urlencode([*kept, *wanted.items()], safe='/,')}"


def _secret(
    bus: Bus,
    name: str,
    component: str,
    data: Mapping[str, bytes],
    *,
    type: str = "Opaque",
    outlives: bool = False,
) -> Json:
    metadata = bus.metadata(name, component, outlives=outlives)
    metadata["labels"][WATCH_LABEL] = "true"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": type,
        "data": {key: base64.b64encode(data[key]).decode("ascii") for key in sorted(data)},
    }
