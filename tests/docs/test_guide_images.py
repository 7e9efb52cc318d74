"""The guide to container images: its commands and tables are those of scripts and programs.

Builders and clusters are used by the end-to-end tests; here commands are compared with the files
that they name.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from store_image.postbus_store import BUFFER_BYTES_UNLIMITED, UNUSABLE, parse
from tests.dev_bus import ROOT
from tests.docs.test_docs import FENCE, check_postbus, check_variable

PAGE = ROOT / "docs" / "guides" / "images.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [(found[1], found[2]) for found in FENCE.finditer(TEXT)]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SCRIPT = ROOT / "e2e" / "build-images.sh"
VARIABLES = re.findall(r"^\| `([A-Z][A-Z0-9_]*)` \|", TEXT, re.MULTILINE)
SETTINGS = ROOT / "e2e" / "settings.sh"
TARGETS = re.findall(r"^FROM .* AS (postbus[a-z-]*)$", DOCKERFILE, re.MULTILINE)
LINES = [
    line for _, text in BLOCKS for line in text.replace("\\\n", " ").splitlines() if line.strip()
]


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target, *variables = words
    assert re.search(rf"^{re.escape(target)}:.*##", makefile, re.MULTILINE), target
    for each in variables:
        assert each.partition("=")[0] in VARIABLES


def check_image(name: str) -> None:
    image, _, tag = name.partition(":")
    assert image in TARGETS
    assert tag == "dev"


def check_archive(name: str) -> None:
    """The script writes $cache/images/NAME-TAG.tar."""
    found = re.fullmatch(r"e2e/\.cache/images/(.*)-dev\.tar", name)
    assert found is not None
    assert found[1] in TARGETS
    assert "archive=$images/$1-$tag.tar" in SCRIPT.read_text(encoding="utf-8")


def check_run(words: list[str]) -> None:
    """Options of `docker run`, then image and command."""
    at = next(number for number, word in enumerate(words) if word.startswith("postbus:"))
    options, (image, program, *arguments) = words[:at], words[at:]
    check_image(image)
    assert program == "postbus"
    check_postbus(arguments)
    assert "--read-only" in options
    for name, value in pairwise(options):
        if name == "--env":
            check_variable(value.partition("=")[0])
    mounted = {word.split(":")[1] for word in options if re.match(r"\w+:/", word)}
    home = re.search(r"^WORKDIR (/var/lib/postbus)$", DOCKERFILE, re.MULTILINE)
    assert home is not None
    assert home[1] in mounted


@pytest.mark.parametrize("line", LINES)
def test_commands_name_what_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "sudo":
        words = words[1:]
    match words:
        case ["make", *rest]:
            check_make(rest)
        case [script, group] if script.startswith("e2e/"):
            assert f"[{group}]=" in (ROOT / script).read_text(encoding="utf-8")
        case ["docker", "build", "--target", target, "--tag", image, "."]:
            assert target in TARGETS
            check_image(image)
        case ["docker", "run", *rest]:
            check_run(rest)
        case ["kind", "load", "docker-image", *images]:
            for image in images:
                check_image(image)
        case ["kind", "load", "image-archive", archive]:
            check_archive(archive)
        case ["ctr", "--namespace", "k8s.io", "images", "import", archive]:
            check_archive(archive)
        case _:
            pytest.fail(f"no check for {line}")


def test_variables_are_those_of_the_script() -> None:
    script = SCRIPT.read_text(encoding="utf-8") + SETTINGS.read_text(encoding="utf-8")
    assert VARIABLES == ["TAG", "BASE", "E2E_CACHE"]
    assert [name for name in VARIABLES if f"${{{name}:-" not in script] == []


def test_options_and_their_defaults_are_those_of_the_store() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `?([^|`]+)`? \|", TEXT, re.MULTILINE)
    defaults = vars(parse(["--max-connections", "7"]))
    assert {name.removeprefix("--").replace("-", "_") for name, _ in rows} == set(defaults)
    for name, shown in rows:
        default = defaults[name.removeprefix("--").replace("-", "_")]
        if name == "--max-connections":
            assert shown.strip() == "required"
        elif default is None:
            assert f"{BUFFER_BYTES_UNLIMITED >> 20}MB without" in shown
        elif isinstance(default, float):
            assert float(shown) == default
        else:
            assert shown.strip() == str(default)


def test_folders_are_those_of_the_store() -> None:
    rows = re.findall(r"^\| `(/[^|]*)` \|", TEXT, re.MULTILINE)
    folders = {Path(name) for row in rows for name in row.split("`, `")}
    used = {
        each for each in vars(parse(["--max-connections", "7"])).values() if isinstance(each, Path)
    }
    assert folders == {*used, Path("/tmp")}
    assert f"Exit code {UNUSABLE}:" in TEXT


def test_the_script_explains_itself() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Build the container images")
    assert [name for name in VARIABLES if name not in done.stdout] == []
