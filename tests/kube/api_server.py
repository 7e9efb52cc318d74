"""A Kubernetes API server on etcd, both on loopback, without nodes and controllers.

Its programs come from `make kube-tools`, which builds them in `E2E_CACHE`.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.ports import free_ports

ROOT: Final = Path(__file__).resolve().parent.parent.parent
BIN: Final = Path(os.environ.get("E2E_CACHE") or ROOT / "e2e" / ".cache") / "bin"
TOKEN: Final = "token-of-the-tests"
OPERATOR: Final = "system:serviceaccount:postbus-system:postbus-operator"
OPERATOR_TOKEN: Final = "token-of-the-operator"
"""The ServiceAccount of the charts; it may do what their roles grant."""
START_S: Final = 120.0
"""Limit of a start, for a machine under load; it takes 10 s."""

APPLY: Final = "application/apply-patch+yaml"


class ApiError(Exception):
    """An answer above 400. `message` is for people."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Program:
    """A program that writes into a log file, and can be started again."""

    def __init__(self, log: Path, *command: str | Path) -> None:
        self.log = log
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running server; whoever has the token may do everything."""

    url: str
    folder: Path
    program: Program

    def request(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> Any:
        """Return the JSON of an answer; raises `ApiError`."""
        asked = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": content},
        )
        try:
            with urllib.request.urlopen(asked, context=_unverified(), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            try:
                said = json.loads(text)["message"]
            except (ValueError, KeyError):
                said = text
            raise ApiError(error.code, said) from None

    def apply(self, path: str, wanted: dict[str, Any], *, is_dry: bool = False) -> Any:
        """Apply an object on the server's side; unknown fields are errors."""
        query = "?fieldManager=tests&force=true&fieldValidation=Strict" + "&dryRun=All" * is_dry
        return self.request("PATCH", path + query, wanted, APPLY)

    def restart(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill the server and start it again with the same data and address."""
        self.program.kill()
        meanwhile()
        self.program.start()
        _wait_until_ready(self)

    def audit(self, user: str = OPERATOR) -> list[dict[str, Any]]:
        """Return the requests of a user so far."""
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["user"]["username"] == user]

    def kubeconfig(self, token: str = TOKEN) -> Path:
        """Return a file for kubectl and clients."""
        path = self.folder / f"kubeconfig-{token}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "tests",
                    "clusters": [
                        {
                            "name": "tests",
                            "cluster": {"server": self.url, "insecure-skip-tls-verify": True},
                        }
                    ],
                    "users": [{"name": "tests", "user": {"token": token}}],
                    "contexts": [
                        {"name": "tests", "context": {"cluster": "tests", "user": "tests"}}
                    ],
                }
            )
        )
        return path


def missing_programs() -> list[str]:
    """Return the programs that are not there."""
    return [
        name for name in ("etcd", "kube-apiserver", "kubectl", "helm") if not (BIN / name).exists()
    ]


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run a server until the context ends; nothing of it stays."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="postbus-kube-")))
        etcd, peer, port = free_ports(3)
        stack.enter_context(
            _running(
                folder / "etcd.log",
                BIN / "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls=http://127.0.0.1:{etcd}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                "--unsafe-no-fsync",
                "--log-level=error",
            )
        )
        _write_keys(folder)
        program = stack.enter_context(
            _running(
                folder / "kube-apiserver.log",
                BIN / "kube-apiserver",
                f"--etcd-servers=http://127.0.0.1:{etcd}",
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={folder / 'certificates'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                f"--audit-policy-file={folder / 'audit-policy.json'}",
                f"--audit-log-path={folder / 'audit.jsonl'}",
                f"--admission-control-config-file={folder / 'admission.json'}",
                "--authorization-mode=RBAC",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'service-account.pem'}",
                f"--service-account-signing-key-file={folder / 'service-account.pem'}",
                "--service-cluster-ip-range=10.96.0.0/16",
                # Without nodes and controllers nobody makes the accounts it would wait for.
                "--disable-admission-plugins=ServiceAccount",
            )
        )
        server = ApiServer(f"https://127.0.0.1:{port}", folder, program)
        _wait_until_ready(server)
        yield server


def _wait_until_ready(server: ApiServer) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if server.program.has_ended:
            break
        try:
            server.request("GET", "/api/v1/namespaces/default")
            return
        except (ApiError, OSError):
            time.sleep(0.1)
    log = server.program.log.read_text(errors="replace")
    raise RuntimeError(f"kube-apiserver did not start: {log[-4_000:]}")


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _write_keys(folder: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    (folder / "service-account.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    tokens = f'{TOKEN},tests,tests,"system:masters"\n{OPERATOR_TOKEN},{OPERATOR},operator\n'
    (folder / "tokens.csv").write_text(tokens)
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}],
    }
    (folder / "audit-policy.json").write_text(json.dumps(policy))
    (folder / "admission.json").write_text(json.dumps(RESTRICTED))


RESTRICTED: Final[dict[str, Any]] = {
    "apiVersion": "apiserver.config.k8s.io/v1",
    "kind": "AdmissionConfiguration",
    "plugins": [
        {
            "name": "PodSecurity",
            "configuration": {
                "apiVersion": "pod-security.admission.config.k8s.io/v1",
                "kind": "PodSecurityConfiguration",
                "defaults": {"enforce": "restricted", "enforce-version": "latest"},
            },
        }
    ],
}
"""Every namespace enforces the restricted Pod Security Standard, labelled or not."""


@contextmanager
def _running(log: Path, *command: str | Path) -> Iterator[Program]:
    program = Program(log, *command)
    program.start()
    try:
        yield program
    finally:
        program.kill()
