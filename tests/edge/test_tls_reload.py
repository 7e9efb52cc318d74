"""Certificates that change while a server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from postbus.edge import certificates
from postbus.edge.certificates import (
    CertificateUnusable,
    ReloadingContext,
    Renewal,
    ServerCertificate,
    TlsFiles,
    ensure_certificate,
    server_context,
)
from tests.edge.front_rig import AMQP_HEADER, HOST, answers_http, front, wait_until


@pytest.fixture
def used(tmp_path: Path) -> ServerCertificate:
    """The files that the server has."""
    return ensure_certificate(tmp_path / "used")


@pytest.fixture
def other(tmp_path: Path) -> ServerCertificate:
    """A certificate of another authority."""
    return ensure_certificate(tmp_path / "other")


def trusting(files: ServerCertificate) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.authority_file)


def client_certificate(files: ServerCertificate) -> Path:
    """Return a file with a key and a certificate of a client, signed by an authority."""
    folder = files.authority_file.parent
    authority = x509.load_pem_x509_certificate(files.authority_file.read_bytes())
    signing = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(authority.not_valid_before_utc)
        .not_valid_after(authority.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signing, hashes.SHA256())
    )
    made = folder / "client.pem"
    made.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return made


def install(source: Path, target: Path) -> None:
    """Replace a file in one step, as those do that renew certificates."""
    made = target.with_suffix(".new")
    shutil.copy(source, made)
    os.replace(made, target)


async def serial(port: int, trusted: ssl.SSLContext | None = None) -> int:
    """Connect and return the number of the certificate that is shown."""
    if trusted is None:
        trusted = ssl.create_default_context()
        trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(HOST, port, ssl=trusted)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


def serial_of(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def test_new_files_are_shown_to_new_clients_and_old_ones_stay(
    runner: asyncio.Runner, used: ServerCertificate, other: ServerCertificate
) -> None:
    old, new = trusting(used), trusting(other)
    tls = ReloadingContext(TlsFiles(used.certificate_file, used.key_file))

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=tls.context)
            reader, writer = await asyncio.open_connection(HOST, port, ssl=old)
            assert tls.look() is False
            install(other.certificate_file, used.certificate_file)
            install(other.key_file, used.key_file)
            assert tls.look() is True
            assert await serial(port, new) == serial_of(other.certificate_file)
            assert await answers_http(port, new)
            with pytest.raises(ssl.SSLCertVerificationError):
                await serial(port, old)
            writer.write(AMQP_HEADER)
            assert await reader.readexactly(8) == AMQP_HEADER
            writer.close()

    runner.run(run())


def test_expiry_follows_the_certificate_in_use(
    runner: asyncio.Runner, used: ServerCertificate, tmp_path: Path
) -> None:
    """Also while a newer pair cannot be used."""
    tls = ReloadingContext(TlsFiles(used.certificate_file, used.key_file))
    first = tls.expires_s
    later = ensure_certificate(
        tmp_path / "later", ("localhost",), datetime.now(UTC) + timedelta(days=100)
    )
    install(later.certificate_file, used.certificate_file)
    assert (tls.look(), tls.expires_s) == (False, first)
    install(later.key_file, used.key_file)
    assert tls.look() is True
    assert round((tls.expires_s - first) / 86_400) == 100


def test_broken_pair_is_logged_once_and_the_old_one_stays(
    runner: asyncio.Runner,
    used: ServerCertificate,
    other: ServerCertificate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = ReloadingContext(TlsFiles(used.certificate_file, used.key_file))
    before = serial_of(used.certificate_file)

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=tls.context)
            install(other.certificate_file, used.certificate_file)  # the key does not fit yet
            assert tls.look() is False
            assert tls.look() is False
            assert await serial(port) == before
            used.key_file.unlink()
            assert tls.look() is False
            used.certificate_file.write_text("no certificate")
            assert tls.look() is False
            assert await serial(port) == before
            install(other.certificate_file, used.certificate_file)
            install(other.key_file, used.key_file)
            assert tls.look() is True
            assert await serial(port) == serial_of(other.certificate_file)

    runner.run(run())
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3
    assert "the old one stays" in errors[0].getMessage()
    assert "BEGIN" not in caplog.text


async def test_changed_certificate_files_are_loaded(
    used: ServerCertificate, other: ServerCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "RELOAD_S", 0.01)
    tls = ReloadingContext(TlsFiles(used.certificate_file, used.key_file))
    before = tls._latest
    watching = asyncio.create_task(tls.watch())
    install(other.certificate_file, used.certificate_file)
    install(other.key_file, used.key_file)
    await wait_until(lambda: tls._latest is not before)
    watching.cancel()


@pytest.fixture
def ago() -> list[timedelta]:
    """Return how far the clock of a renewal is behind, as its only item.

    It starts when a certificate must have been made that is to be renewed an hour before now.
    """
    days = certificates.SERVER_DAYS - certificates.RENEW_DAYS
    return [timedelta(days=days, hours=1)]


@pytest.fixture
def renewal(tmp_path: Path, ago: list[timedelta]) -> Renewal:
    return Renewal(tmp_path / "made", now=lambda: datetime.now(UTC) - ago[0])


def test_certificate_that_was_made_is_renewed_while_it_is_used(
    runner: asyncio.Runner, renewal: Renewal, ago: list[timedelta]
) -> None:
    files = renewal.files
    tls = ReloadingContext(TlsFiles(files.certificate_file, files.key_file), renewal)
    client, first = trusting(files), serial_of(files.certificate_file)

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=tls.context)
            reader, writer = await asyncio.open_connection(HOST, port, ssl=client)
            ago[0] = timedelta(hours=2)
            assert tls.look() is False
            assert await serial(port, client) == first
            ago[0] = timedelta()
            assert tls.look() is True
            renewed = await serial(port, client)  # of the same authority
            assert renewed == serial_of(files.certificate_file) != first
            assert tls.look() is False
            writer.write(AMQP_HEADER)
            assert await reader.readexactly(8) == AMQP_HEADER
            writer.close()

    runner.run(run())


def test_renewal_that_fails_is_logged_once_an_hour_and_the_old_certificate_stays(
    renewal: Renewal, ago: list[timedelta], caplog: pytest.LogCaptureFixture
) -> None:
    files = renewal.files
    tls = ReloadingContext(TlsFiles(files.certificate_file, files.key_file), renewal)
    authority = files.authority_file.read_text()
    files.authority_file.write_text("no certificate")
    ago[0] = timedelta(minutes=59)
    assert [tls.look() for _ in range(3)] == [False] * 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "BEGIN" not in caplog.text
    files.authority_file.write_text(authority)
    assert tls.look() is False
    ago[0] -= timedelta(hours=1)
    assert tls.look() is True


def test_encrypted_key_is_refused_without_a_prompt(used: ServerCertificate) -> None:
    key = serialization.load_pem_private_key(used.key_file.read_bytes(), None)
    used.key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CertificateUnusable, match="cannot be used"):
        server_context(TlsFiles(used.certificate_file, used.key_file))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize(("minimum", "offered"), [("1.2", "1.1"), ("1.3", "1.2")])
def test_versions_below_the_minimum_are_refused(
    runner: asyncio.Runner, used: ServerCertificate, minimum: str, offered: str
) -> None:
    tls = server_context(TlsFiles(used.certificate_file, used.key_file, minimum))
    client = trusting(used)
    client.maximum_version = getattr(ssl.TLSVersion, f"TLSv{offered.replace('.', '_')}")

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, tls=tls)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await serial(port, client)
            assert await serial(port)

    runner.run(run())


def test_clients_show_certificates_of_an_authority_that_may_change(
    runner: asyncio.Runner, used: ServerCertificate, other: ServerCertificate, tmp_path: Path
) -> None:
    authority = tmp_path / "clients.pem"
    shutil.copy(used.authority_file, authority)
    tls = ReloadingContext(
        TlsFiles(
            used.certificate_file,
            used.key_file,
            client_authority_file=authority,
            requires_client=True,
        )
    )

    def client(files: ServerCertificate | None) -> ssl.SSLContext:
        made = trusting(used)
        if files is not None:
            made.load_cert_chain(client_certificate(files))
        return made

    async def run() -> None:
        async with front() as listeners:
            port = await listeners.listen(HOST, 0, is_plain=False, tls=tls.context)
            assert await answers_http(port, client(used))
            for files in (None, other):
                with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                    await answers_http(port, client(files))
            install(other.authority_file, authority)
            assert tls.look()
            assert await answers_http(port, client(other))
            with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
                await answers_http(port, client(used))

    runner.run(run())


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_certificate_of_an_authority_that_is_gone_does_not_live_on_in_a_session(
    used: ServerCertificate, other: ServerCertificate, tmp_path: Path, newest: ssl.TLSVersion
) -> None:
    authority = tmp_path / "clients.pem"
    shutil.copy(used.authority_file, authority)
    files = TlsFiles(used.certificate_file, used.key_file, client_authority_file=authority)
    tls = ReloadingContext(files)
    client = trusting(used)
    client.maximum_version = newest
    client.load_cert_chain(client_certificate(used))

    def ask(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection((HOST, port), 10) as plain,
            client.wrap_socket(plain, server_hostname="localhost", session=session) as peer,
        ):
            peer.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            answer = peer.recv(1_000)
            return answer, peer.session

    async with front() as listeners:
        port = await listeners.listen(HOST, 0, is_plain=False, tls=tls.context)
        session, answer = None, b""
        with suppress(ssl.SSLError, ConnectionError):  # no TLS 1.2 with client certificates
            answer, session = await asyncio.to_thread(ask, port, None)
        assert bool(answer) is (newest is ssl.TLSVersion.TLSv1_3)
        install(other.authority_file, authority)
        assert tls.look()
        answer = b""
        with suppress(ssl.SSLError, ConnectionError):
            answer, _ = await asyncio.to_thread(ask, port, session)
        assert answer == b""
