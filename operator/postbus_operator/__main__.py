"""`postbus-operator`: the Kubernetes operator of Postbus."""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
from typing import Final

from kubernetes.aio.config import ConfigException

import postbus
from postbus_operator.running.log_format import set_up_logging
from postbus_operator.running.process import run
from postbus_operator.running.tls_buffers import limit_tls_buffers
from postbus_operator.settings import PREFIX, Settings, SettingsError, load_settings

NESTING: Final = 100_000
"""Limit of Python's recursion, which decoding JSON counts, too. The API server takes values that
are nested 10,000 deep in fields without a schema; a list that cannot be read ends the operator."""

UNUSABLE: Final = 3
"""Exit code for settings that cannot be used, as that of the broker."""


def main() -> int:
    """Run the operator; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="postbus-operator",
        description="Run the Kubernetes operator of Postbus. All settings are environment"
        " variables; the API server is that of KUBECONFIG or of the pod.",
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=postbus.__version__)
    parser.parse_args()
    sys.setrecursionlimit(NESTING)
    limit_tls_buffers()
    try:
        settings = load_settings()
        set_up_logging(settings.log_format, settings.log_level)
        return asyncio.run(run(settings))
    except (SettingsError, ConfigException) as error:
        print(f"postbus-operator: {error}", file=sys.stderr)
        return UNUSABLE


def settings_help() -> str:
    """Return the settings with their meaning."""
    lines = []
    for name, field in Settings.model_fields.items():
        lines.append(f"{PREFIX}{name.upper()}")
        text = " ".join((field.description or "").split())
        lines.append(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
