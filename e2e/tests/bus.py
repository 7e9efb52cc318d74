"""A bus in a cluster namespace, and the official SDK connected to it from outside of the cluster.

The SDK runs in the process of the test, on a laptop as on a machine that is the node itself:
`kubectl port-forward` leads to the broker, and names of Services resolve to it in this process. So
connection string, host name and certificate are those that the operator wrote. A forward ends with
its pod; the next client gets another one. During faults run clients in a pod (`traffic.py`).
"""

from __future__ import annotations

import base64
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceivedMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import ServiceBusAdministrationClient
from e2e.tests.cluster import LIMIT_S, Space
from e2e.tests.manifests import bus as bus_manifest

WAIT_S: Final = 10.0
"""Time that a receiver waits for a message."""

CLUSTER_SUFFIX: Final = ".svc.cluster.local"
_resolve = socket.getaddrinfo


def _resolve_services(host: Any, *arguments: Any, **options: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    is_service = isinstance(name, str) and name.endswith(CLUSTER_SUFFIX)
    return _resolve("127.0.0.1" if is_service else host, *arguments, **options)


socket.getaddrinfo = _resolve_services


class Forward:
    """A port of this machine that leads to one of a Service, made again when its pod has gone."""

    def __init__(self, space: Space, service: str, port: int) -> None:
        self._space, self._service, self._port = space, service, port
        self._process: subprocess.Popen[str] | None = None
        self._local = 0
        self._pod_uid = ""

    def local_port(self, pod_uid: str) -> int:
        """Return the port; the Service must have a ready pod, which has this identity."""
        if self._process is None or self._process.poll() is not None or self._pod_uid != pod_uid:
            self.end()
            self._pod_uid = pod_uid
            self._start()
        return self._local

    def _start(self) -> None:
        command = [
            "kubectl", "--namespace", self._space.name, "port-forward",
            f"service/{self._service}", f":{self._port}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
        assert said, line + self._process.stdout.read()
        self._local = int(said[1])

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass
class Bus:
    """A bus by its resource; `make` applies one."""

    space: Space
    name: str
    _forward: Forward = field(init=False)
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __post_init__(self) -> None:
        self._forward = Forward(self.space, self.name, 5671)

    @classmethod
    def make(cls, space: Space, name: str, **spec: Any) -> Bus:
        space.apply(bus_manifest(name, **spec))
        return cls(space, name)

    def wait_ready(self, limit_s: float = 2 * LIMIT_S) -> None:
        self.space.wait_ready(f"sbns/{self.name}", limit_s=limit_s)

    def end(self) -> None:
        self._forward.end()
        self._folder.cleanup()

    @property
    def broker(self) -> str:
        return f"{self.name}-broker-0"

    @property
    def _root(self) -> str:
        return f"{self.name}-bus-root"

    # --- SDK ------------------------------------------------------------------------------------

    def secret(self, name: str, space: Space | None = None) -> dict[str, str]:
        return values_of((space or self.space).get(f"secret/{name}"))

    def local_port(self) -> int:
        return self._forward.local_port(self.space.get(f"pod/{self.broker}")["metadata"]["uid"])

    def _authority(self, name: str, values: dict[str, str]) -> str:
        """Return the path of a file with the authority of a Secret."""
        path = Path(self._folder.name) / f"{name}.crt"
        path.write_text(values["ca.crt"])
        return str(path)

    @contextmanager
    def sdk(self, secret: str = "", space: Space | None = None) -> Iterator[ServiceBusClient]:
        """Connect with a Secret of the operator; by default with that of the whole bus."""
        name = secret or self._root
        values = self.secret(name, space)
        with self._client(values["connectionString"], self._authority(name, values)) as client:
            yield client

    @contextmanager
    def connected(self, connection_string: str, secret: str) -> Iterator[ServiceBusClient]:
        """Connect with a connection string and the authority of a Secret."""
        with self._client(
            connection_string, self._authority(secret, self.secret(secret))
        ) as client:
            yield client

    @contextmanager
    def _client(self, connection_string: str, authority: str) -> Iterator[ServiceBusClient]:
        host = re.search(r"Endpoint=sb://([^/;:]+)", connection_string)
        assert host
        with ServiceBusClient.from_connection_string(
            connection_string,
            connection_verify=authority,
            custom_endpoint_address=f"sb://{host[1]}:{self.local_port()}",
            retry_total=2,
            retry_backoff_factor=0.5,
        ) as client:
            yield client

    @contextmanager
    def administration(self, secret: str = "") -> Iterator[ServiceBusAdministrationClient]:
        name = secret or self._root
        values = self.secret(name)
        text = values["connectionString"]
        text = re.sub(r"(Endpoint=sb://[^/;:]+)/", rf"\1:{self.local_port()}/", text)
        with ServiceBusAdministrationClient.from_connection_string(
            text, connection_verify=self._authority(name, values)
        ) as client:
            yield client

    def send(self, path: str, *messages: ServiceBusMessage | str) -> None:
        """Send messages to a queue."""
        made = [ServiceBusMessage(each) if isinstance(each, str) else each for each in messages]
        with self.sdk() as client, client.get_queue_sender(path) as sender:
            sender.send_messages(made[0] if len(made) == 1 else made)  # a batch has a lower limit

    def take(self, path: str, count: int, **options: Any) -> list[ServiceBusReceivedMessage]:
        """Receive and complete messages of a queue, or of `topic/subscription`."""
        found: list[ServiceBusReceivedMessage] = []
        with self.sdk() as client, receiver_of(client, path, **options) as receiver:
            while len(found) < count:
                batch = receiver.receive_messages(count - len(found), max_wait_time=WAIT_S)
                assert batch, f"{path}: {len(found)} of {count} messages: {found}"
                for each in batch:
                    receiver.complete_message(each)
                found += batch
        return found

    def texts(self, path: str, count: int, **options: Any) -> list[str]:
        return [str(each) for each in self.take(path, count, **options)]


def values_of(secret: dict[str, Any]) -> dict[str, str]:
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def receiver_of(client: ServiceBusClient, path: str, **options: Any) -> Any:
    topic, slash, subscription = path.partition("/")
    if slash:
        return client.get_subscription_receiver(topic, subscription, **options)
    return client.get_queue_receiver(path, **options)


def refusal(bus: Bus, path: str, message: ServiceBusMessage | str = "refused") -> ServiceBusError:
    """Return the error of a send that the bus must refuse."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            bus.send(path, message)
        except ServiceBusError as error:
            return error
    raise AssertionError(f"{path} accepted the message")
