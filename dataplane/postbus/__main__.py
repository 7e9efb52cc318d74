"""Entry point of the console script and of `python -m postbus`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; the process ends with its exit code."""
    from postbus.cli import run

    run()


if __name__ == "__main__":
    main()
