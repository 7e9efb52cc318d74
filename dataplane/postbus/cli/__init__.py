"""The command line: options to settings, expected failures to one message and an exit code.

Only `__main__` imports it.
"""

from postbus.cli.main import app, run

__all__ = ["app", "run"]
