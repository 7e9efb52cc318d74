"""An S3 on a real socket: moto's server, which `make test-pipeline` installs."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.dev_bus import ROOT
from tests.faults.victims import wait_for_port

PROGRAM = ROOT / ".venv-s3" / "bin" / "moto_server"


@contextmanager
def running_s3(bucket: str, **more: str) -> Iterator[Mapping[str, str]]:
    """Yield the environment for its clients. `more`: that of the server."""
    assert PROGRAM.exists(), "make .venv-s3/.ready installs moto"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
