"""The Python and shell programs of docs/clients.md run unchanged, beside a file ca.pem."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.keeper import TRUST_VARIABLES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "clients.md"
FENCE = re.compile(r"^### ([^\n]+)\n|^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 120
RUN_BY_JAVA = "keytool"


def programs() -> list[tuple[str, str, str]]:
    """Return the section, the language and the text of each."""
    found, section = [], ""
    for match in FENCE.finditer(PAGE.read_text(encoding="utf-8")):
        section = match[1] or section
        if match[2] is not None and not match[3].startswith(RUN_BY_JAVA):
            found.append((section, match[2], match[3]))
    return found


def test_no_client_is_without_a_program() -> None:
    sections = [section for section, _, _ in programs()]
    assert sections == [
        *["Python"] * 4,
        "Celery and kombu",
        "Qpid Proton and other AMQP 1.0 clients",
        "curl",
    ]


@pytest.mark.parametrize(
    ("section", "language", "text"),
    programs(),
    ids=[f"{section.split()[0]}-{number}" for number, (section, _, _) in enumerate(programs())],
)
def test_a_program_runs_as_it_stands(
    section: str, language: str, text: str, tmp_path: Path
) -> None:
    shutil.copy(os.environ["POSTBUS_CA_FILE"], tmp_path / "ca.pem")
    environment = {name: text for name, text in os.environ.items() if name not in TRUST_VARIABLES}
    environment["POSTBUS_CONNECTION_STRING"] = os.environ["POSTBUS_EMULATOR"]
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = [sys.executable, "-c"] if language == "python" else ["sh", "-e", "-c"]
    done = subprocess.run(
        [*shell, text],
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    expected = "0" if "create_queue" in text else "hello"
    assert (done.returncode, done.stdout.strip()) == (0, expected), section + done.stderr
