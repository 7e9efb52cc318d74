"""Secrets of a bus, saved and restored by the commands of the guide, without what they had beside.

Dump and restore of the database need pods: `e2e` runs them.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from postbus_operator.annotations import BUS_LABEL, WATCH_LABEL
from postbus_operator.kube.resource_types import SECRETS, STATEFUL_SETS
from tests.kube.api_server import ApiServer
from tests.kube.bus_rig import Rig, rig_on
from tests.kube.guides import blocks, run

NAMES = ("shop-bus-sealing-key", "shop-bus-ca")


async def shell(rig: Rig, folder: Path, line: str) -> None:
    """Run a line of the guide in a folder, for the cluster namespace of the rig."""
    moved = re.sub(r"\bshop\b(?!-)", rig.namespace, line)
    await asyncio.to_thread(run, rig.server, f"cd {folder}\n{moved}")


def command(words: str) -> str:
    """Return the line of the guide that has these words."""
    [found] = [
        line for block in blocks("backup.md", "sh") for line in block.splitlines() if words in line
    ]
    return found


async def test_a_new_bus_takes_over_the_secrets_of_a_backup(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with rig_on(server, monkeypatch) as lost:
        await lost.put({})
        await lost.look()
        saved = {name: await lost.data_of(name) for name in NAMES}
        await shell(lost, tmp_path, command("> shop-bus-secrets.yaml"))
    async with rig_on(server, monkeypatch) as rig:
        await shell(rig, tmp_path, command("create -f shop-bus-secrets.yaml"))
        await rig.put({})
        await rig.look()
        assert rig.condition("Stalled") is None
        for name in NAMES:
            assert await rig.data_of(name) == saved[name]
            secret = await rig.get(SECRETS, name)
            assert secret is not None
            labels = secret["metadata"]["labels"]
            assert (labels[BUS_LABEL], labels[WATCH_LABEL]) == ("shop-bus", "true")
        served = await rig.data_of("shop-bus-tls")
        assert served["ca.crt"] == saved["shop-bus-ca"]["ca.crt"]
        for name in ("shop-bus-broker", "shop-bus-store-main"):
            assert await rig.get(STATEFUL_SETS, name) is not None
