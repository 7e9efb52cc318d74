"""Writes the dashboards of the chart.

`python -m dashboards.generate charts/postbus/dashboards` writes; with `--check` it compares. Edit
the builders, never the files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.buses import bus, buses
from dashboards.operator_view import operator


def texts() -> dict[str, str]:
    """Return the name of each file and its text."""
    return {f"{name}.json": _text(made) for name, made in _all().items()}


def _all() -> dict[str, Dashboard]:
    return {"buses": buses(), "bus": bus(), "operator": operator()}


def _text(made: Dashboard) -> str:
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` compare them; return the exit code."""
    is_check = "--check" in arguments
    [folder] = (Path(each) for each in arguments if not each.startswith("-"))
    wanted = texts()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    stale = sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )
    for name in stale:
        if is_check:
            print(f"{folder / name}: not what its builder says; run make crds")
        elif name in wanted:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
