"""A namespace that is changed while it runs: handshakes follow at once, and after a restart too."""

from __future__ import annotations

import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from postbus.assembly.listeners import Listener
from postbus.contract.entities import NamespaceProperties
from tests.edge.control.control_bus import DEFINITION, ControlledBus, controlled_bus

pytestmark = pytest.mark.slow


def lets_in(bus: ControlledBus, version: ssl.TLSVersion) -> bool:
    """Say whether a client that speaks no newer TLS gets through the handshake."""
    context = ssl.create_default_context(cafile=str(bus.bus.authority_file))
    context.maximum_version = version
    with socket.create_connection(bus.bus.listeners()[Listener.TLS], timeout=60) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as secret:
                return secret.version() is not None
        except ssl.SSLError:
            return False


def test_the_minimum_tls_version_is_put_and_stays(database: str, tmp_path: Path) -> None:
    with controlled_bus(database, tmp_path / "bus") as bus:
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert bus.caller.put("/v1/namespace", {"minimumTlsVersion": "1.3"}).status == 200
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert lets_in(bus, ssl.TLSVersion.TLSv1_3)
    with controlled_bus(database, tmp_path / "bus") as bus:
        told = bus.caller.get("/v1/namespace").body
        assert told["properties"]["minimumTlsVersion"] == "1.3"
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)
        assert bus.caller.put("/v1/namespace", {}).status == 200
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)


def test_what_the_manifest_says_wins_at_a_start(database: str, tmp_path: Path) -> None:
    said = NamespaceProperties.model_validate({"minimumTlsVersion": "1.3"})
    declared = replace(DEFINITION, properties=said)
    with controlled_bus(database, tmp_path / "bus", definition=declared) as bus:
        changed = {"minimumTlsVersion": "1.2", "tags": {"a": "b"}}
        assert bus.caller.put("/v1/namespace", changed).status == 200
        assert lets_in(bus, ssl.TLSVersion.TLSv1_2)
    with controlled_bus(database, tmp_path / "bus", definition=declared) as bus:
        told = bus.caller.get("/v1/namespace").body["properties"]
        assert (told["minimumTlsVersion"], told["tags"]) == ("1.3", {"a": "b"})
        assert not lets_in(bus, ssl.TLSVersion.TLSv1_2)
