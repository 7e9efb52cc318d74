from __future__ import annotations

import asyncio
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from postbus.edge.certificates import (
    ServerCertificate,
    TlsFiles,
    ensure_certificate,
    server_context,
)


async def greet(files: ServerCertificate, name: str, trusted: Path) -> str:
    """Connect over TLS and return the version both sides agreed on."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = server_context(TlsFiles(files.certificate_file, files.key_file))
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = ssl.create_default_context(cafile=str(trusted))
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname=name
        )
        version = writer.get_extra_info("ssl_object").version()
        writer.close()
        return str(version)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "bus.internal"])
async def test_client_that_trusts_the_authority_connects(tmp_path: Path, name: str) -> None:
    files = ensure_certificate(tmp_path, ["bus.internal"])
    assert await greet(files, name, files.authority_file) == "TLSv1.3"


async def test_other_names_and_other_authorities_are_not_trusted(tmp_path: Path) -> None:
    files = ensure_certificate(tmp_path / "a")
    other = ensure_certificate(tmp_path / "b")
    with pytest.raises(ssl.SSLCertVerificationError):
        await greet(files, "elsewhere.example", files.authority_file)
    with pytest.raises(ssl.SSLCertVerificationError):
        await greet(files, "localhost", other.authority_file)


def test_everything_is_for_the_owner_only(tmp_path: Path) -> None:
    ensure_certificate(tmp_path / "tls")
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert found == dict.fromkeys(["ca.pem", "ca.key", "server.pem", "server.key"], 0o600)


def test_certificate_is_kept_until_it_has_to_change(tmp_path: Path) -> None:
    def served() -> bytes:
        return files.certificate_file.read_bytes()

    files = ensure_certificate(tmp_path)
    first, authority = served(), files.authority_file.read_bytes()
    ensure_certificate(tmp_path)
    assert served() == first
    ensure_certificate(tmp_path, ["bus.internal"])
    renamed = served()
    assert renamed != first
    ensure_certificate(tmp_path, ["bus.internal"], datetime.now(UTC) + timedelta(days=380))
    assert served() != renamed
    assert files.authority_file.read_bytes() == authority


def test_damaged_file_is_an_error_and_not_replaced(tmp_path: Path) -> None:
    files = ensure_certificate(tmp_path)
    files.authority_file.write_text("no certificate")
    with pytest.raises(ValueError, match=r".+"):
        ensure_certificate(tmp_path)
