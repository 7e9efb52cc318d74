"""`postbus connections`: the connected clients, their keys and links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import examples, expected_failures
from postbus.cli.formats.output import Format, OutputFormat, print_objects

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

EPILOG: Final = examples(
    "postbus connections                  AMQP clients, longest connected first",
    "postbus connections orders           clients with a link to this entity",
    "postbus connections -o json          with all links",
)
COLUMNS: Final = {
    "connection": "connection",
    "address": "address",
    "rules": "rule",
    "senders": "senders",
    "receivers": "receivers",
    "credit": "credit",
    "locks": "locks",
    "idleS": "idle s",
}


def connections(
    entity: Annotated[
        str | None,
        typer.Argument(
            help="Only clients with a link to this entity.", autocompletion=complete_entities
        ),
    ] = None,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """List the clients connected to the broker, their links, credit and locks."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> list[dict[str, Any]]:
        return await control.all_of("/v1/connections")

    with expected_failures():
        found = run_with(find_target(context), work)
        if entity is not None:
            found = [
                each
                for each in found
                if any(link["entity"].lower() == entity.lower() for link in each["links"])
            ]
        shown = [_row(each) for each in found] if output.is_table else found
        print_objects(shown, output, COLUMNS, "no clients are connected")


def _row(answer: dict[str, Any]) -> dict[str, Any]:
    links = answer["links"]
    receivers = [each for each in links if each["role"] == "receiver"]
    return {
        **answer,
        "rules": ", ".join(answer["rules"]),
        "senders": len(links) - len(receivers),
        "receivers": len(receivers),
        "credit": sum(each["credit"] for each in receivers),
        "locks": sum(each["locks"] for each in receivers),
    }
