#!/usr/bin/env python3
"""Check commit messages: `area: what changes`, and a body that says why above 30 changed lines.

Without arguments: the commits after the last change of `.ci/commit-baseline`. With a file, as git's
`commit-msg` hook calls it: that message, with the staged changes. CONTRIBUTING.md has the rules.

A clone without the history of the baseline (shallow, squashed, no repository at all) has nothing
to check, and passes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

AREAS: Final = frozenset({
    "amqp", "assembly", "broker", "cli", "client", "contract", "edge", "entity", "fast",
    "manifests", "message", "process", "rules", "store", "testing",  # packages of dataplane/postbus
    "chart", "crds", "operator", "pipeline",  # distributions that are planned
    "bench", "build", "ci", "docs", "examples", "tests",
    "repo",  # a change through the whole tree, as a move of packages
})  # fmt: skip
GENERATED: Final = frozenset({
    "docs/behaviours.md", "docs/openapi.json", "requirements-build.lock",
    "requirements-declarative.lock", "requirements-demo.lock", "requirements-image.lock",
    "requirements-pipeline.lock", "requirements-s3.lock", "requirements-spark42.lock",
    "requirements.lock",
})  # fmt: skip
TITLE_COLUMNS: Final = 71
LINES_WITHOUT_BODY: Final = 30

BASELINE: Final = Path(__file__).with_name("commit-baseline")
REVERT: Final = 'Revert "'
NOT_FOR_MAIN: Final = ("Merge ", "fixup! ", "squash! ", "amend! ")
TRAILER: Final = re.compile(r"([\w-]+-by|Change-Id|Closes|Fixes|Refs): ")
SCISSORS: Final = re.compile(r"^# -+ >8 -+$.*", re.MULTILINE | re.DOTALL)


class Commit(NamedTuple):
    """A commit as `git log` shows it; `changed_lines` leaves out generated files."""

    name: str
    message: str
    changed_lines: int


class GitError(Exception):
    """A git command failed; the text is its own."""


def complaints(message: str, changed_lines: int) -> list[str]:
    """Return the rules that a message breaks, as sentences."""
    title, _, body = message.strip().partition("\n")
    if title.startswith(REVERT):
        return []
    found = []
    areas, colon, subject = title.partition(": ")
    if not colon or not subject or not set(areas.split(", ")) <= AREAS:
        found.append(f"begin the title with an area: {', '.join(sorted(AREAS))}")
    if len(title) > TITLE_COLUMNS:
        found.append(f"shorten the title to {TITLE_COLUMNS} characters; it has {len(title)}")
    if ";" in title:
        found.append("one topic for each commit: no ';' in the title")
    text = [line for line in body.splitlines() if line.strip() and not TRAILER.match(line)]
    if changed_lines > LINES_WITHOUT_BODY and not text:
        found.append(f"{changed_lines} lines changed: say in a body why, and what was measured")
    return found


def main(arguments: list[str]) -> int:
    """Check a message or the history; return the exit code."""
    if arguments:
        return check_file(Path(arguments[0]))
    return check_history()


def check_file(path: Path) -> int:
    """Check the message of a commit in the making."""
    text = SCISSORS.sub("", path.read_text(encoding="utf-8"))
    message = git("stripspace", "--strip-comments", given=text)
    if not message or message.startswith(NOT_FOR_MAIN):
        return 0
    staged = git("diff", "--cached", "-M", "--numstat")
    found = complaints(message, count_lines(staged))
    for each in found:
        print(f"commit message: {each}", file=sys.stderr)
    return 1 if found else 0


def check_history() -> int:
    """Check the commits after the baseline."""
    try:
        commits = commits_after_baseline()
    except GitError as error:
        print(f"commit messages: nothing to check: {error}")
        return 0
    bad = 0
    for commit in commits:
        for each in complaints(commit.message, commit.changed_lines):
            title = commit.message.partition("\n")[0]
            print(f"{commit.name[:10]} {title}\n    {each}", file=sys.stderr)
            bad += 1
    print(f"commit messages: {len(commits)} checked")
    return 1 if bad else 0


def commits_after_baseline() -> list[Commit]:
    """Return the commits after the last change of the baseline file, without merges.

    Raises:
        GitError: this is no repository, or the file is not in its history.
    """
    base = git("log", "-1", "--format=%H", "--", str(BASELINE)).strip()
    if not base:
        raise GitError(f"no commit has {BASELINE.name}")
    log = git(
        "log", "--no-merges", "-M", "-l0", "--numstat", "--format=%x01%H%x00%B%x00", f"{base}..HEAD"
    )
    commits = []
    for entry in log.split("\x01")[1:]:
        name, message, changes = entry.split("\x00")
        commits.append(Commit(name, message, count_lines(changes)))
    return commits


def count_lines(numstat: str) -> int:
    """Return the added and removed lines of `git … --numstat`; a pure rename has none."""
    count = 0
    for line in numstat.splitlines():
        added, _, rest = line.partition("\t")
        removed, _, path = rest.partition("\t")
        if added.isdigit() and path not in GENERATED:  # "-" for a binary file
            count += int(added) + int(removed)
    return count


def git(*arguments: str, given: str | None = None) -> str:
    """Return the output of a git command in the folder of the repository."""
    command = ["git", "-c", "core.quotePath=false", *arguments]
    try:
        done = subprocess.run(
            command, cwd=BASELINE.parent.parent, input=given, capture_output=True, check=False,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise GitError(str(error)) from error
    if done.returncode:
        raise GitError(done.stderr.partition("\n")[0])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
