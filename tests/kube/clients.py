"""The operator's own access to the API server of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kubernetes.aio.client import Configuration

from postbus_operator.kube.api import Api
from postbus_operator.kube.connection import api_client, load_configuration
from tests.kube.api_server import TOKEN, ApiServer


class Calls:
    """What an `Api` reports: requests by verb and status, and objects that writes made."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, int]] = []
        self.objects: list[Any] = []

    def answered(self, verb: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append((verb, status))


async def configuration_of(
    server: ApiServer, monkeypatch: Any, token: str = TOKEN
) -> Configuration:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(token)))
    return await load_configuration(connections=50)


@asynccontextmanager
async def api_of(configuration: Configuration, calls: Calls | None = None) -> AsyncIterator[Api]:
    calls = Calls() if calls is None else calls
    async with api_client(configuration) as client:
        yield Api(client, on_answer=calls.answered, on_object=calls.objects.append)
