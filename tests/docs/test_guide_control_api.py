"""The guide of the control API, tried: its commands run as written, its tables are true."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postbus.contract.control import Applied, ProblemType
from postbus.edge.control.routes import ROUTES
from postbus.process.settings import Settings
from tests.dev_bus import LIMIT_S, ROOT, DevBus, running_dev_bus

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "guides" / "control-api.md"
FENCE = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def dev_bus() -> Iterator[DevBus]:
    with running_dev_bus() as bus:
        yield bus


def command_output(bus: DevBus, folder: Path) -> list[str]:
    """Run all commands of the guide in one shell; return the output of each block."""
    (folder / ".postbus").mkdir()
    (folder / ".postbus" / "control.token").write_text(bus.token, encoding="ascii")
    port = Settings.model_fields["control_port"].default
    mark = "\n--- next ---\n"
    blocks = FENCE.findall(GUIDE.read_text(encoding="utf-8"))
    script = f"printf '{mark}'\n".join(blocks).replace(
        f"127.0.0.1:{port}", urlsplit(bus.control).netloc
    )
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        cwd=folder,
    )
    return done.stdout.split(mark)


def answers(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line]


def test_commands_of_the_guide_work(dev_bus: DevBus, tmp_path: Path) -> None:
    document, status, queue, topic, marked, moved, *rest = command_output(dev_bus, tmp_path)
    namespace, closed, opened, keys, rotated, connected, restored, *rest = rest
    history, messages, groups, audit, fenced, forgotten = rest
    made_group, listed = answers(groups)
    assert [each["name"] for each in listed["items"]] == [made_group["name"]] == ["lake"]
    assert json.loads(namespace)["entityId"] == 0
    assert document.startswith('{\n "components"')
    assert answers(status)[0]["program"] == "postbus"
    (put,) = answers(queue)
    assert (put["created"], len(put["appliedHash"])) == (True, 64)
    made, subscribed, counted = answers(topic)
    assert (made["created"], subscribed["created"], counted["messageCount"]) == (True, True, 0)
    assert answers(marked)[0]["created"] is False
    assert json.loads(closed)["isClosed"] is True
    assert json.loads(opened)["isClosed"] is False
    (page,) = answers(moved)
    assert (page["isEnd"], page["startsOver"]) == (True, True)
    assert {"orders", "shop/events/Subscriptions/large"} <= {each["name"] for each in page["items"]}
    rule, with_keys = answers(keys)
    assert (rule["primaryKey"], with_keys["rights"]) == (None, ["Listen", "Send"])
    assert min(len(with_keys["primaryKey"]), len(with_keys["secondaryKey"])) == 44
    (back,) = answers(rotated)
    assert back["updatedAt"] > with_keys["updatedAt"]
    assert isinstance(answers(connected)[0]["items"], list)
    (back,) = answers(restored)
    assert back["entityId"] == put["entityId"]
    changes, tombstones = answers(history)
    assert changes["items"][-1]["name"] == "orders"
    assert tombstones["items"] == []
    peeked, purged = answers(messages)
    assert (peeked["messages"], purged["deleted"]) == ([], 0)
    lines, of_orders = answers(audit)
    assert [each["verb"] for each in lines["items"][:2]] == ["create reader group", "restore"]
    assert {each["entity"] for each in of_orders["items"]} == {"orders"}
    assert answers(fenced)[0]["created"] is False
    assert answers(forgotten)[0]["highestCallerEpoch"] == 0


def test_tables_of_the_guide_name_all_routes_and_conditions() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    fields = {field.alias or name for name, field in Applied.model_fields.items()}
    table = text.partition("| field of the answer |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(rows) == fields
    kinds = {each.value.rpartition(":")[2] for each in ProblemType} - {"blank"}
    assert all(f"`{kind}`" in text for kind in kinds), kinds
    paths = {re.sub(r"{\w+}", "{name}", route.path) for route in ROUTES}
    named = re.findall(r"`(/v1/[^`…?]+)[`?]", text)
    assert set(named) <= paths, set(named) - paths
