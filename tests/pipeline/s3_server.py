"""An S3 on a real socket: moto's server, which `make test-pipeline` installs."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from tests.dev_bus import ROOT
from tests.faults.victims import wait_for_port
from tests.ports import free_ports

PROGRAM = ROOT / ".venv-s3" / "bin" / "moto_server"


@contextmanager
def running_s3(bucket: str, **more: str) -> Iterator[Mapping[str, str]]:
    """Yield the environment for its clients. `more`: that of the server."""
    assert PROGRAM.exists(), "make .venv-s3/.ready installs moto"
    [port] = free_ports(1)
    process = subprocess.Popen(
        [PROGRAM, "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        asyncio.run(wait_for_port(port))
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
        connection.close()
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "eu-central-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        process.terminate()
        process.wait(30)


class Gate:
    """Stands between an S3 and its clients, and can be as if the S3 was away.

    Moto forgets its objects when it ends, so it keeps running.
    """

    def __init__(self, address: str) -> None:
        """`address`: http://host:port of the S3."""
        self.closes_at: bytes | None = None
        """The first request that begins so finds the S3 away, and all others until `open`."""

        self.refused = threading.Semaphore(0)
        """Released with each connection that is refused."""

        host, _, behind = address.removeprefix("http://").partition(":")
        self._server = host, int(behind)
        self._is_closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self.closes_at, self._is_closed = None, False

    def end(self) -> None:
        self._listener.close()
        self._break_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.add(client)
                if self._is_closed:
                    self._break_all()
                    self.refused.release()
                    continue
                server = socket.create_connection(self._server)
                self._sockets.add(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.closes_at is not None and data.startswith(self.closes_at):
                    self._is_closed = True
                    self._break_all()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _break_all(self) -> None:
        """Reset all connections."""
        while self._sockets:
            broken = self._sockets.pop()
            with suppress(OSError):
                broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                broken.shutdown(socket.SHUT_RDWR)
                broken.close()


@contextmanager
def gated_s3(bucket: str) -> Iterator[tuple[Gate, Mapping[str, str]]]:
    """Yield a gate before an S3, and the environment of clients that go through it."""
    with running_s3(bucket) as surroundings:
        gate = Gate(surroundings["AWS_ENDPOINT_URL"])
        try:
            yield gate, {**surroundings, "AWS_ENDPOINT_URL": gate.address}
        finally:
            gate.end()
