"""Results of suites: the called public methods of a client, and the successful ones.

Each process of a suite records its calls as JSON; `reasons.toml` has the reasons why methods are
not called or cannot work. A method that never worked and is not explained fails the suite, so does
an explanation of one that works. As a program, after the suites, it prints the table of
docs/clients.md, which `--write` brings up to date.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCUMENT = HERE.parents[1] / "docs" / "clients.md"
BEGIN = "<!-- Written by `make test-sdk REPORT_FLAGS=--write`. -->\n"
END = "<!-- End of what is written. -->\n"


class Calls(NamedTuple):
    """Numbers of calls and of successful calls of a method."""

    tried: int
    worked: int


Methods = dict[str, Calls]


def read_calls(files: Iterable[Path]) -> Methods:
    """Add up the calls that the processes of a suite recorded."""
    total: Methods = {}
    for file in files:
        for name, calls in json.loads(file.read_text())["methods"].items():
            before = total.get(name, Calls(0, 0))
            total[name] = Calls(before.tried + calls["tried"], before.worked + calls["worked"])
    assert total, "the suite wrote down no calls"
    return total


def reasons_of(client: str) -> dict[str, str]:
    """Return why methods of a client are not called, or do not work, by patterns of their names."""
    return dict(tomllib.loads((HERE / "reasons.toml").read_text()).get(client, {}))


def is_explained(name: str, reasons: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in reasons)


def keep(client: str, version: str, methods: Methods) -> None:
    """Check the calls of a suite and keep them for the table."""
    RESULTS.mkdir(exist_ok=True)
    found = {"client": client, "version": version, "methods": methods}
    (RESULTS / f"{client.replace('/', '-')}.json").write_text(json.dumps(found))
    reasons = reasons_of(client)
    open_ones = {name for name, calls in methods.items() if calls.worked == 0}
    unexplained = sorted(name for name in open_ones if not is_explained(name, reasons))
    assert not unexplained, f"never worked, and reasons.toml says nothing: {unexplained}"
    stale = sorted(name for name in set(methods) - open_ones if is_explained(name, reasons))
    assert not stale, f"reasons.toml explains what works: {stale}"
    idle = [one for one in reasons if not any(is_explained(name, [one]) for name in open_ones)]
    assert not idle, f"reasons.toml explains what is not there: {idle}"


def table() -> str:
    """Return the section of docs/clients.md from the results of the last runs."""
    lines = ["| client | version | public methods | called | worked |", "|---|---|---|---|---|"]
    notes: list[str] = []
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text())
        client, methods = found["client"], found["methods"]
        tried = sum(each[0] > 0 for each in methods.values())
        worked = sum(each[1] > 0 for each in methods.values())
        lines.append(f"| {client} | {found['version']} | {len(methods)} | {tried} | {worked} |")
        by_reason: dict[str, list[str]] = {}
        for name, reason in reasons_of(client).items():
            by_reason.setdefault(reason, []).append(f"`{name}`")
        for reason, names in by_reason.items():
            notes.append(f"- {client}, {', '.join(names)}: {reason}")
    return "\n".join([*lines, "", *notes]) + "\n"


def main(arguments: list[str]) -> int:
    """Print the table; return 0 if the document contains it."""
    now = table()
    sys.stdout.write(now)
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    if shown == now:
        return 0
    if "--write" in arguments:
        DOCUMENT.write_text(f"{before}{BEGIN}{now}{END}{after}")
        return 0
    sys.stderr.write("docs/clients.md: make test-sdk REPORT_FLAGS=--write\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
