"""Runs one suite of another language and its bus, in a network and a mount namespace of its own.

SDKs insist on ports 443 and 5671 and on a host name; here both are free and the name is ours. This
program is what `unshare` starts (see suites.py). It brings loopback up, lays a hosts file over the
machine's, keeps a bus and runs the suite's command, which asks it over HTTP for what a test cannot
do itself:

    POST /restart?how=stop|kill     the bus is stopped or killed and started again
    POST /stop?how=stop|kill        and POST /start

It answers when that is done. Postgres runs outside and is reached through its socket.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit

from postbus.process.data_directory import CONTROL_TOKEN_NAME

HOST = "sdk-suite.servicebus.windows.net"
HOST_OF_PAGES = "bus.example.net"
KEEPER_PORT = 9470
CONTROL_PORT = 9465
READY_S = 60.0
TRUST_VARIABLES = ("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


@dataclass(frozen=True)
class Plan:
    """The suite to run, read from JSON. Paths are absolute."""

    folder: str
    manifests: str
    stores: str
    command: list[str]
    cwd: str
    environment: dict[str, str]
    limit_s: float
    trust_files: list[str]


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def name_hosts(folder: Path) -> None:
    """Mount a hosts file over the machine's, visible in this namespace only."""
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {HOST} {HOST_OF_PAGES} {socket.gethostname()}\n")
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)


class KeptBus:
    """A bus as a user starts it, on the registered ports; its log is kept beside its data."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._lock = threading.Lock()

    @property
    def authority_file(self) -> Path:
        return Path(self._plan.folder) / "data" / "tls" / "ca.pem"

    @property
    def control_token(self) -> str:
        """The bearer token of the control API, where it asks for one."""
        file = Path(self._plan.folder) / "data" / CONTROL_TOKEN_NAME
        return file.read_text().strip()

    def start(self) -> None:
        with self._lock:
            self._start()

    def stop(self, how: str) -> None:
        with self._lock:
            self._stop(how)

    def restart(self, how: str) -> None:
        with self._lock:
            self._stop(how)
            self._start()

    def _start(self) -> None:
        assert self._process is None, "the bus runs"
        folder = Path(self._plan.folder)
        self._log = (folder / "bus.log").open("a")
        environment = {
            **os.environ,
            "NO_COLOR": "1",
            "POSTBUS_STORES": self._plan.stores,
            "POSTBUS_TLS_NAMES": f"{HOST},{HOST_OF_PAGES}",
            "POSTBUS_TLS_PORT": "5671",
            "POSTBUS_HTTP_PORT": "443",
            "POSTBUS_CONTROL_PORT": str(CONTROL_PORT),
            "POSTBUS_GRACE_S": "1",
        }
        arguments = ["dev", self._plan.manifests, "--clock", "manual", "--unsafe"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "postbus", *arguments, "--data", str(folder / "data")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._wait_ready()

    def _wait_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        late = threading.Timer(READY_S, self._process.kill)
        late.start()
        printed = ""
        for line in self._process.stdout:
            printed += line
            if line.startswith("ready"):
                late.cancel()
                return
        late.cancel()
        raise RuntimeError(f"the bus did not start: {printed}; see bus.log")

    def _stop(self, how: str) -> None:
        assert self._process is not None, "the bus does not run"
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._stop("stop")


def serve_requests(bus: KeptBus) -> None:
    """Let the suite stop and start the bus."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            url = urlsplit(self.path)
            how = parse_qs(url.query).get("how", ["stop"])[0]
            try:
                if url.path == "/restart":
                    bus.restart(how)
                elif url.path == "/stop":
                    bus.stop(how)
                elif url.path == "/start":
                    bus.start()
                else:
                    raise ValueError(f"{url.path} is not known")
                status, text = 200, "done"
            except (AssertionError, RuntimeError, ValueError, OSError) as error:
                status, text = 500, str(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", KEEPER_PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def connection_string(rule: str, key: str, host: str, rest: str = "") -> str:
    return f"Endpoint=sb://{host};SharedAccessKeyName={rule};SharedAccessKey={key}{rest}"


def suite_environment(plan: Plan, bus: KeptBus) -> dict[str, str]:
    root = ("RootManageSharedAccessKey", "SAS_KEY_VALUE")
    return {
        **os.environ,
        "POSTBUS_HOST": HOST,
        "POSTBUS_EMULATOR": connection_string(
            *root, "localhost:5672", ";UseDevelopmentEmulator=true"
        ),
        "POSTBUS_TLS": connection_string(*root, HOST),
        "POSTBUS_CA_FILE": str(bus.authority_file),
        "POSTBUS_KEEPER": f"http://127.0.0.1:{KEEPER_PORT}",
        "POSTBUS_CONTROL": f"http://127.0.0.1:{CONTROL_PORT}",
        "POSTBUS_CONTROL_TOKEN": bus.control_token,
        **plan.environment,
    }


def main() -> int:
    plan = Plan(**json.loads(sys.stdin.read()))
    bring_loopback_up()
    name_hosts(Path(plan.folder))
    bus = KeptBus(plan)
    bus.start()
    try:
        for file in plan.trust_files:
            subprocess.run(["mount", "--bind", str(bus.authority_file), file], check=True)
        serve_requests(bus)
        # Other trust stores of the languages: their own variables point to this one authority.
        trust = dict.fromkeys(TRUST_VARIABLES, str(bus.authority_file))
        environment = {**suite_environment(plan, bus), **trust}
        return subprocess.run(
            plan.command, check=False, cwd=plan.cwd, env=environment, timeout=plan.limit_s
        ).returncode
    finally:
        bus.close()


if __name__ == "__main__":
    sys.exit(main())
