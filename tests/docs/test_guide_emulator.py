"""docs/guides/from-the-emulator.md works: every block of it is run, in its order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from postbus.cli.formats.emulator_config import EMULATOR_KEYS
from postbus.cli.serving.running import key_remarks, local_bus
from tests.cli.command_line import CommandLine, folder_with_bus, user_folder
from tests.dev_bus import ROOT

PAGE = ROOT / "docs" / "guides" / "from-the-emulator.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WAIT_S = 0.5


def blocks() -> list[tuple[str, str]]:
    return FENCE.findall(PAGE.read_text(encoding="utf-8"))


def test_page_has_the_blocks_that_are_run_here() -> None:
    assert [language for language, _ in blocks()] == ["json", "sh", "sh", "python", "sh"]


@pytest.mark.slow
def test_a_program_of_the_emulator_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    (_, config), (_, carrying), (_, starting), (_, program), (_, using) = blocks()
    with user_folder() as folder:
        user = CommandLine(folder)
        (folder / "Config.json").write_text(config)
        imported, checked = carrying.splitlines()
        assert imported == "postbus import Config.json > bus.yaml"
        done = user.run("import", "Config.json")
        assert (done.returncode, "SAS_KEY_VALUE" in done.stderr) == (0, True)
        (folder / "bus.yaml").write_text(done.stdout)
        assert user.ok(*checked.split()[1:]).startswith("ok sbemulatorns (Standard)")

        assert starting == "postbus dev bus.yaml\n"
        with folder_with_bus(str(folder / "bus.yaml")) as here:
            run_program(program, here)
            assert capsys.readouterr().out == "near\n"
            outputs = [here.ok(*line.split()[1:]) for line in using.splitlines()]
            assert '"hello"' in outputs[1]
            assert "SharedAccessKey=SAS_KEY_VALUE" in outputs[2]


def run_program(text: str, here: CommandLine) -> None:
    """Run the page's program as written, only with this bus's port and less patience."""
    (address,) = re.findall(r"Endpoint=sb://[^;]+", here.announced)
    text = text.replace("Endpoint=sb://localhost", address)
    variables: dict[str, Any] = {}
    exec(text.replace("max_wait_time=5", f"max_wait_time={WAIT_S}"), variables)


@pytest.mark.slow
def test_a_bare_bus_accepts_emulator_connection_strings_and_prints_one() -> None:
    with folder_with_bus() as here:
        (shown,) = re.findall(r"^Endpoint=.*", here.announced, re.MULTILINE)
        assert ";SharedAccessKey=SAS_KEY_VALUE;" in shown
        send = ("send", "queue.1", "x")
        assert here.ok(*send, POSTBUS_CONNECTION_STRING=shown)


def test_a_bare_bus_that_others_reach_makes_keys() -> None:
    for host, is_public in (("127.0.0.1", True), ("::1", True), ("0.0.0.0", False)):
        bus = local_bus(host)
        assert (bus.rules[0].keys == EMULATOR_KEYS) is is_public
        assert bool(key_remarks(bus)) is is_public
