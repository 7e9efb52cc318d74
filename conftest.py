"""Loads what every run needs; fixtures live in tests/conftest.py."""

from __future__ import annotations

pytest_plugins = ["tests.behaviour_report"]
