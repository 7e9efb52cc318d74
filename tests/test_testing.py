"""`postbus.testing`: its guide's tests pass where the package was installed from a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.dev_bus import LIMIT_S, ROOT, environment

PAGE = ROOT / "docs" / "guides" / "testing-with-time.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.behaviour("S70", "S84", "S85")
def test_tests_of_the_guide_pass_with_an_installed_wheel(tmp_path: Path) -> None:
    installed = install_wheel(tmp_path)
    found: dict[str, list[str]] = {}
    for language, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        found.setdefault(language, []).append(text)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "bus.yaml").write_text(found["yaml"][0], encoding="utf-8")
    for text in (*found["python"], *found["toml"]):
        name = text.partition("\n")[0].removeprefix("# ")
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "test_origin.py").write_text(ORIGIN.format(installed=str(installed)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=folder,
        env={**environment(), "PYTHONPATH": str(installed)},
    )
    assert (done.returncode, "5 passed" in done.stdout) == (0, True), done.stdout


ORIGIN = """
import time
import postbus.testing

def test_it_is_the_installed_one():
    assert postbus.testing.__file__.startswith({installed!r})

def test_an_outage_ends_by_itself(postbus):
    from azure.servicebus import ServiceBusClient, ServiceBusMessage

    postbus.outage("PT0.2S")
    client = ServiceBusClient.from_connection_string(postbus.connection_string)
    with client, client.get_queue_sender("orders") as sender:
        sender.send_messages(ServiceBusMessage("kept"))
"""


def install_wheel(folder: Path) -> Path:
    """Build the package and install it alone; return its folder."""
    built, installed = folder / "built", folder / "installed"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        held.extractall(installed)
    return installed
