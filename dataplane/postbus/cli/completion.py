"""Entity names for shell completion and `did you mean` hints; after an error there are none.

Names come from the running bus of the command. Imports are deferred until names are needed.
"""

from __future__ import annotations

import asyncio
import difflib
from typing import TYPE_CHECKING, Final

import typer

from postbus.cli.client.contexts import find_target

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

PATIENCE_S: Final = 2.0
"""Longest wait for a completion after a key press."""


def complete_entities(context: typer.Context, incomplete: str) -> list[str]:
    """Return the queues, topics and subscriptions with this prefix."""
    from postbus.cli.client.control_client import ControlClient

    async def ask() -> list[str]:
        async with asyncio.timeout(PATIENCE_S), ControlClient(target) as control:
            return await names_of(control)

    try:
        target = find_target(context.params.get("context"))
        found = asyncio.run(ask())
    except Exception:  # noqa: BLE001 a shell that completes shows no errors
        return []
    return [name for name in found if name.lower().startswith(incomplete.lower())]


async def names_of(control: ControlClient) -> list[str]:
    """Return the names of all entities, as commands take them; raises `RefusedError`."""
    from postbus.cli.client.control_client import part

    names = [str(each["name"]) for each in await control.all_of("/v1/queues")]
    for topic in await control.all_of("/v1/topics"):
        name = str(topic["name"])
        names.append(name)
        found = await control.all_of(f"/v1/topics/{part(name)}/subscriptions")
        names += [f"{name}/Subscriptions/{each['name']}" for each in found]
    return names


async def did_you_mean(control: ControlClient, name: str) -> str:
    """Return a hint for an unknown name, "" when no name is similar."""
    found = {each.lower(): each for each in await names_of(control)}
    near = difflib.get_close_matches(name.lower(), found, 1, 0.6)
    return f"; did you mean {found[near[0]]}?" if near else ""
