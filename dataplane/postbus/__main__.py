"""Entry point of the console script and of `python -m postbus`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the process ends with its exit code."""
    try:
        from postbus.cli import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("postbus"):
            raise
        sys.exit(f"postbus: {error.name} is missing: pip install 'postbus[dataplane,embedded]'")
    run()


if __name__ == "__main__":
    main()
