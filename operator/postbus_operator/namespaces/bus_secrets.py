"""Secrets of a bus: made once and kept, renewed in time, or taken over from the user's.

The sealing key, the authority and the passwords of stores live as long as the data; they are never
replaced. Secrets may come in any order: what is missing is a trouble of the look, and the cache
wakes the resource when it appears.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from postbus.contract.operator_spec import PostgresStore
from postbus_operator.annotations import BUS_LABEL, WATCH_LABEL
from postbus_operator.certificates import (
    BUNDLE,
    Authority,
    CertificateInvalid,
    checked_pair,
    leaf_data,
    new_authority,
    parse_authorities,
    renewed_authority,
)
from postbus_operator.children import secret_objects as objects
from postbus_operator.children.broker import KEY_FILE, TOKEN_FILE
from postbus_operator.children.bus import BROKER, Bus, Json
from postbus_operator.children.store import PASSWORD_FILE
from postbus_operator.context import Context
from postbus_operator.kube.api import NotFound
from postbus_operator.kube.resource_types import SECRETS, VOLUME_CLAIMS
from postbus_operator.namespaces.child_writer import ChildWriter
from postbus_operator.namespaces.status import Look, Trouble
from postbus_operator.objects import Key

Data = Mapping[str, bytes]

KEY_BYTES: Final = 32
LEAST_TOKEN: Final = 20
"""Shortest control token that a broker accepts."""

LOOK_AGAIN: Final = timedelta(hours=12)
"""Period of the looks at objects that nothing has changed: certificates grow old."""

CERTIFICATE_API: Final = "cert-manager.io/v1"


class Settled:
    """Versions of objects of buses that were complete, so that a resync compares nothing else."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[object, datetime]] = {}

    def holds(self, key: Key, versions: object, now: datetime) -> bool:
        """Return whether a bus was complete with these versions, and is not due again."""
        known = self._known.get(key)
        return known is not None and known[0] == versions and now < known[1]

    def keep(self, key: Key, versions: object, now: datetime) -> None:
        """Remember a bus that is complete."""
        self._known[key] = (versions, now + LOOK_AGAIN)

    def drop(self, key: Key) -> None:
        """Forget a bus."""
        self._known.pop(key, None)


async def ensure_secrets(
    context: Context, bus: Bus, look: Look, writer: ChildWriter, settled: Settled
) -> bool:
    """Make all Secrets of a bus; return whether its brokers can start with them."""
    before = _versions(context, bus, look)
    if before is not None and settled.holds(bus.key, before, context.now()):
        return True
    keeper = _Keeper(context, bus, look, writer)
    troubles = len(look.troubles)
    is_complete = await keeper.run()
    after = _versions(context, bus, look)
    if is_complete and len(look.troubles) == troubles and not look.differing and after is not None:
        settled.keep(bus.key, after, context.now())
    else:
        settled.drop(bus.key)
    return is_complete


def own_names(bus: Bus) -> list[str]:
    """Return the names of the Secrets that the operator makes for a bus to run."""
    fixed = [bus.child(each) for each in ("sealing-key", "ca", "control-token", "tls", "stores")]
    of_stores = [
        f"{bus.store(each.name)}-{part}" for each in bus.managed for part in ("auth", "tls")
    ]
    return [*fixed, *of_stores]


def _sources(bus: Bus) -> list[str]:
    """Return the names of the Secrets that others make."""
    operator = bus.spec.operator_spec
    found = []
    for store in operator.storage.stores:
        if store.postgres is not None:
            found.append(store.postgres.secret_ref.name)
            if store.postgres.ca_secret_ref is not None:
                found.append(store.postgres.ca_secret_ref.name)
    if operator.tls.secret_name is not None:
        found.append(operator.tls.secret_name)
    if operator.tls.issuer_ref is not None:
        found.append(bus.child("issued-tls"))
    return found


def _versions(context: Context, bus: Bus, look: Look) -> object | None:
    """Return what the Secrets follow from; None: some are not in the cache."""
    found = []
    for name in (*own_names(bus), *_sources(bus)):
        known = context.cache.find(SECRETS, bus.key.namespace, name)
        if known is None:
            return None
        found.append(known["metadata"]["resourceVersion"])
    return (look.resource.uid, look.resource.generation, bus.platform, *found)


class _Keeper:
    """One pass over the Secrets of a bus."""

    def __init__(self, context: Context, bus: Bus, look: Look, writer: ChildWriter) -> None:
        self._context = context
        self._bus = bus
        self._look = look
        self._writer = writer

    async def run(self) -> bool:
        """Make all Secrets; return whether brokers can start."""
        has_key = await self._sealing_key()
        await self._control_token()
        authority = await self._authority()
        passwords = await self._passwords()
        if authority is None:
            return False
        has_certificate = await self._certificates(authority)
        has_stores = await self._stores_file(authority, passwords)
        return has_key and has_certificate and has_stores

    # --- made once ------------------------------------------------------------------------------

    async def _sealing_key(self) -> bool:
        name = self._bus.child("sealing-key")
        data = await self._read(name)
        if data is None:
            if self._has_data():
                self._stall(
                    f"Secret {name} is missing, and without it the keys in the databases cannot be"
                    " read: restore it from a backup"
                )
                return False
            made = base64.b64encode(secrets.token_bytes(KEY_BYTES))
            return await self._writer.create(objects.sealing_key(self._bus, made))
        key = data.get(KEY_FILE, b"")
        try:
            is_key = len(base64.b64decode(key.strip(), validate=True)) == KEY_BYTES
        except (binascii.Error, ValueError):
            is_key = False
        if not is_key:
            self._stall(
                f"Secret {name}: {KEY_FILE} is not base64 of {KEY_BYTES} bytes: restore it from a"
                " backup"
            )
            return False
        return await self._put(objects.sealing_key(self._bus, key), adopts=True)

    async def _control_token(self) -> None:
        data = await self._read(self._bus.child("control-token")) or {}
        token = data.get(TOKEN_FILE, b"")
        if len(token.strip()) < LEAST_TOKEN:
            token = secrets.token_urlsafe(KEY_BYTES).encode()
        await self._put(objects.control_token(self._bus, token))

    async def _authority(self) -> Authority | None:
        name = self._bus.child("ca")
        data = await self._read(name)
        now = self._context.now()
        if data is None:
            authority = new_authority(self._bus.bus_name, now)
            is_made = await self._writer.create(objects.authority(self._bus, authority.data()))
            return authority if is_made else None
        try:
            found = Authority.from_data(data)
            authority = renewed_authority(found, self._bus.bus_name, now)
        except CertificateInvalid as error:
            self._stall(
                f"Secret {name}: {error}: restore it from a backup; if you delete it, a new"
                " authority is made, which clients do not trust yet"
            )
            return None
        is_put = await self._put(objects.authority(self._bus, authority.data()), adopts=True)
        return authority if is_put else None

    async def _passwords(self) -> dict[str, str]:
        found = {}
        for store in self._bus.managed:
            name = f"{self._bus.store(store.name)}-auth"
            data = await self._read(name)
            if data is None:
                made = secrets.token_urlsafe(KEY_BYTES)
                wanted = objects.store_password(self._bus, store.name, made.encode())
                if await self._writer.create(wanted):
                    found[store.name] = made
                continue
            password = data.get(PASSWORD_FILE, b"").decode("ascii", "replace").rstrip("\r\n")
            if not password or not password.isascii() or not password.isprintable():
                self._stall(
                    f"Secret {name}: {PASSWORD_FILE} is no printable ASCII text: set another one,"
                    " or delete the Secret to get a new password"
                )
                continue
            wanted = objects.store_password(self._bus, store.name, data[PASSWORD_FILE])
            if await self._put(wanted, adopts=True):
                found[store.name] = password
        return found

    # --- certificates ---------------------------------------------------------------------------

    async def _certificates(self, authority: Authority) -> bool:
        now = self._context.now()
        for store in self._bus.managed:
            service = self._bus.store(store.name)
            former = await self._read(f"{service}-tls")
            names = [*self._bus.hosts(service), self._bus.host(f"{service}-0.{service}")]
            data = leaf_data(authority, names, now, former)
            await self._put(objects.store_certificate(self._bus, store.name, data))
        name = self._bus.child("tls")
        former = await self._read(name)
        tls = self._bus.spec.operator_spec.tls
        if tls.secret_name is None and tls.issuer_ref is None:
            data = leaf_data(authority, self._bus.certificate_names, now, former)
            return await self._put(objects.broker_certificate(self._bus, data))
        if tls.secret_name is not None:
            text = f"Secret {tls.secret_name} is missing: create it with tls.crt and tls.key"
            served = await self._served(tls.secret_name, text)
        else:
            await self._put(_certificate(self._bus))
            source = self._bus.child("issued-tls")
            served = await self._served(
                source,
                f"cert-manager has not issued Secret {source} yet: see"
                f" `kubectl describe certificate {name}`",
            )
        if served is None:
            return former is not None
        return await self._put(objects.broker_certificate(self._bus, served))

    async def _served(self, source: str, missing: str) -> Data | None:
        data = await self._read(source)
        if data is None:
            self._wait(missing)
            return None
        try:
            checked_pair(data, self._context.now())
        except CertificateInvalid as error:
            self._stall(f"Secret {source}: {error}: replace it; the former certificate stays")
            return None
        return {name: data[name] for name in ("tls.crt", "tls.key", BUNDLE) if data.get(name)}

    # --- databases ------------------------------------------------------------------------------

    async def _stores_file(self, authority: Authority, passwords: Mapping[str, str]) -> bool:
        addresses: dict[str, str] = {}
        authorities: dict[str, bytes] = {}
        for store in self._bus.spec.operator_spec.storage.stores:
            if store.postgres is None:
                if store.name not in passwords:
                    return False
                continue
            address = await self._address(store.name, store.postgres)
            if address is None:
                return False
            addresses[store.name] = address
            if store.postgres.ca_secret_ref is not None:
                reference = store.postgres.ca_secret_ref
                found = await self._value(reference.name, reference.key)
                if found is None:
                    return False
                try:
                    parse_authorities(found, reference.key, self._context.now())
                except CertificateInvalid as error:
                    self._stall(f"Secret {reference.name}: {error}: replace it")
                    return False
                authorities[store.name] = found
        wanted = objects.stores_file(self._bus, passwords, addresses, authorities, authority.bundle)
        return await self._put(wanted)

    async def _address(self, store: str, postgres: PostgresStore) -> str | None:
        reference = postgres.secret_ref
        found = await self._value(reference.name, reference.key)
        if found is None:
            return None
        address = found.decode("utf-8", "replace").strip()
        try:
            objects.with_tls(address, postgres.ssl_mode, None)
        except objects.AddressInvalid:
            self._stall(
                f"Secret {reference.name}: {reference.key} is not one address: set it to"
                " postgresql://user@host/database, with a colon and the password after the user;"
                " in both write @ / ? # % and blanks as %40 %2F %3F %23 %25 %20"
                f" (store {store})"
            )
            return None
        return address

    async def _value(self, name: str, key: str) -> bytes | None:
        data = await self._read(name)
        if data is None:
            self._wait(f"Secret {name} is missing: create it with the key {key}")
            return None
        if not data.get(key):
            self._wait(f"Secret {name} has no key {key}: add it, or set the key in the spec")
            return None
        return data[key]

    # --- helpers --------------------------------------------------------------------------------

    async def _read(self, name: str) -> Data | None:
        try:
            found = await self._context.api.get(SECRETS, self._bus.key.namespace, name)
        except NotFound:
            return None
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    async def _put(self, wanted: Json, *, adopts: bool = False) -> bool:
        return await self._writer.put(wanted, "secrets", adopts=adopts)

    def _has_data(self) -> bool:
        claims = self._context.cache.children_of(self._bus.key.namespace, self._bus.name)
        has_claim = any(each["kind"] == VOLUME_CLAIMS.kind for each in claims)
        return has_claim or self._look.was_ready

    def _stall(self, message: str) -> None:
        self._look.troubles.append(Trouble("secrets", "SecretInvalid", message, is_stalled=True))

    def _wait(self, message: str) -> None:
        self._look.troubles.append(Trouble("secrets", "SecretMissing", message, is_stalled=False))


def _certificate(bus: Bus) -> Json:
    """Return the Certificate of cert-manager, which has the same names as a certificate of ours."""
    issuer = bus.spec.operator_spec.tls.issuer_ref
    assert issuer is not None
    names = bus.certificate_names
    addresses = [each for each in names if each.replace(".", "").isdigit()]
    spec: Json = {
        "secretName": bus.child("issued-tls"),
        # Seen by the operator as soon as it is issued.
        "secretTemplate": {"labels": {WATCH_LABEL: "true", BUS_LABEL: bus.name}},
        "issuerRef": issuer.model_dump(),
        "dnsNames": [each for each in names if each not in addresses],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "server auth"],
    }
    if addresses:
        spec["ipAddresses"] = addresses
    return {
        "apiVersion": CERTIFICATE_API,
        "kind": "Certificate",
        "metadata": bus.metadata(bus.child("tls"), BROKER),
        "spec": spec,
    }
