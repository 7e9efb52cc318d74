"""TLS of servers: contexts that follow their files, and certificates made where none are given.

A bus in production gets its certificate from the settings; a renewal replaces the files. On a
developer's machine the bus makes an authority for its data directory and signs its certificate with
that. Private keys are readable by the owner only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

logger = logging.getLogger(__name__)

RELOAD_S: Final = 5.0
"""Interval of checks of the files."""

AUTHORITY_DAYS = 3_650
SERVER_DAYS = 397  # the longest that browsers and Apple's TLS accept
RENEW_DAYS = 30
RENEWAL_LOOK = timedelta(hours=1)
"""Interval of checks of a certificate made here, and of retries after a failure."""

BACKDATE = timedelta(hours=1)  # clients with a slow clock

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """Files in PEM form; `authority_file` is what clients have to trust."""

    authority_file: Path
    certificate_file: Path
    key_file: Path


def ensure_certificate(
    folder: Path, names: Sequence[str] = (), now: datetime | None = None
) -> ServerCertificate:
    """Return the certificate for loopback and `names`, made or renewed only if needed.

    The authority outlives server certificates, so that clients trust it once. Raises OSError when
    the folder cannot be written, ValueError when a file in it is damaged.
    """
    now = now or datetime.now(UTC)
    wanted = tuple(dict.fromkeys([*LOCAL_NAMES, *names]))
    files = ServerCertificate(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, authority_key = _ensure_authority(files.authority_file, folder / "ca.key", now)
    if not _is_usable(files, authority, wanted, now):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _sign_server(key.public_key(), wanted, authority, authority_key, now)
        _write(files.key_file, _private_bytes(key))
        chain = certificate.public_bytes(Encoding.PEM) + authority.public_bytes(Encoding.PEM)
        _write(files.certificate_file, chain)
    return files


class Renewal:
    """Renews a certificate made here, long before it expires, while a server uses it."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str] = (),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Make the certificate if needed; raises like `ensure_certificate`."""
        self._folder = folder
        self._names = names
        self._now = now
        self._looked = now()
        self.files = ensure_certificate(folder, names, self._looked)

    def look(self) -> None:
        """Renew the certificate when due; log failures and try again later."""
        now = self._now()
        if abs(now - self._looked) < RENEWAL_LOOK:
            return
        self._looked = now
        try:
            ensure_certificate(self._folder, self._names, now)
        except (OSError, ValueError) as error:
            logger.error(
                "the certificate cannot be renewed; the old one stays in use",
                extra={"file": str(self.files.certificate_file), "why": str(error)},
            )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server's TLS.

    With a `client_authority_file` clients may present a certificate, signed by one of these
    authorities; with `requires_client` they must. Clients then have to use TLS 1.3.
    """

    certificate_file: Path
    key_file: Path
    minimum: str = "1.2"
    client_authority_file: Path | None = None
    requires_client: bool = False

    def paths(self) -> list[Path]:
        """Return the files."""
        found = [self.certificate_file, self.key_file, self.client_authority_file]
        return [path for path in found if path is not None]


class ReloadingContext:
    """The TLS context of a server; it follows its files.

    `context` stays the same object: each handshake is moved to the files loaded last. Connections
    keep the context they began with.
    """

    def __init__(self, files: TlsFiles, renewal: Renewal | None = None) -> None:
        """Load the files; raises OSError (ssl.SSLError is one) when they cannot be used.

        `renewal` renews these files if they were made here.
        """
        self._files = files
        self._renewal = renewal
        self._seen = self._stamps()
        self.context = self._latest = server_context(files)
        self.expires_s = _expiry_s(files.certificate_file)
        """Expiry of the certificate in use, seconds since 1970."""
        self.context.sni_callback = self._use_latest

    async def watch(self) -> None:
        """Check the files for ever."""
        while True:
            await asyncio.sleep(RELOAD_S)
            self.look()

    def look(self) -> bool:
        """Load changed files and log it. Unusable files change nothing."""
        if self._renewal is not None:
            self._renewal.look()
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        file = str(self._files.certificate_file)
        try:
            self._latest = server_context(self._files)
            self.expires_s = _expiry_s(self._files.certificate_file)
        except OSError as error:
            logger.error(
                "the new certificate cannot be used; the old one stays in use",
                extra={"file": file, "why": str(error)},
            )
            return False
        logger.info("certificate loaded", extra={"file": file})
        return True

    def require(self, minimum: str) -> None:
        """Refuse new connections below a version of TLS, "1.2" or "1.3"."""
        self._files = replace(self._files, minimum=minimum)
        for context in (self.context, self._latest):  # the version is chosen before `_use_latest`
            context.minimum_version = _minimum_version(self._files)

    def _use_latest(
        self, handshake: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        if self._latest is not self.context:
            handshake.context = self._latest

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """Return values that change when a file is written or replaced; None for a missing file."""
        return [_stamp(path) for path in self._files.paths()]


class CertificateUnusable(OSError):
    """Files cannot be used for TLS; the text is for the user and names them."""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a server; raises CertificateUnusable."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = _minimum_version(files)
    context.options |= ssl.OP_NO_RENEGOTIATION  # it costs the server more than the client
    # An encrypted key is an error; without a password OpenSSL would ask for one on the terminal.
    with _usable(f"certificate {files.certificate_file} with the key {files.key_file}"):
        context.load_cert_chain(files.certificate_file, files.key_file, password="")
    if files.client_authority_file is not None:
        context.num_tickets = 0
        with _usable(f"authority of clients {files.client_authority_file}"):
            context.load_verify_locations(files.client_authority_file)
        context.verify_mode = ssl.CERT_REQUIRED if files.requires_client else ssl.CERT_OPTIONAL
    return context


@contextmanager
def _usable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl.SSLError is one too
        reason = error.strerror or str(error)
        raise CertificateUnusable(f"the {what} cannot be used: {reason}") from error


def _expiry_s(certificate_file: Path) -> float:
    """Return the expiry of the first certificate of a chain, which is the server's own."""
    with _usable(f"certificate {certificate_file}"):
        first, *_ = x509.load_pem_x509_certificates(certificate_file.read_bytes())
    return first.not_valid_after_utc.timestamp()


def _minimum_version(files: TlsFiles) -> ssl.TLSVersion:
    """Return the oldest accepted version.

    A resumed session carries a client certificate that is not verified again. TLS 1.3 has no
    resumption without tickets; that of 1.2 cannot be switched off from Python.
    """
    is_newest = files.minimum == "1.3" or files.client_authority_file is not None
    return ssl.TLSVersion.TLSv1_3 if is_newest else ssl.TLSVersion.TLSv1_2


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _ensure_authority(
    certificate_file: Path, key_file: Path, now: datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    if certificate_file.exists() and key_file.exists():
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_file} holds another kind of key")
        if certificate.not_valid_after_utc - now > timedelta(days=SERVER_DAYS):
            return certificate, key
        logger.warning(
            "the CA expires soon and is replaced: clients must trust the new one",
            extra={"file": str(certificate_file)},
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Postbus local authority")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _private_bytes(key))
    _write(certificate_file, certificate.public_bytes(Encoding.PEM))
    return certificate, key


def _sign_server(
    key: ec.EllipticCurvePublicKey,
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    now: datetime,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Postbus")])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + timedelta(days=SERVER_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
        .sign(authority_key, hashes.SHA256())
    )


def _is_usable(
    files: ServerCertificate, authority: x509.Certificate, names: Sequence[str], now: datetime
) -> bool:
    """Return whether the stored certificate covers the names, is valid for long enough and is
    signed by the authority.
    """
    if not files.certificate_file.exists() or not files.key_file.exists():
        return False
    certificate = x509.load_pem_x509_certificate(files.certificate_file.read_bytes())
    covered = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    identity = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        certificate.not_valid_after_utc - now > timedelta(days=RENEW_DAYS)
        and identity.key_identifier == own.digest
        and all(_general_name(name) in covered for name in names)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        address: IPv4Address | IPv6Address = ip_address(name)
    except ValueError:
        return x509.DNSName(name)
    return x509.IPAddress(address)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Write a file for the owner only, whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(name, path)
