"""The command line: options into settings, expected failures into one message and an exit code.

Nobody imports it but `__main__`.
"""

from postbus.cli.main import app, run

__all__ = ["app", "run"]
