"""`postbus keys` and `postbus connection-string`: authorization rules and their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.completion import complete_entities
from postbus.cli.failures import ContextError, RefusedError, examples, expected_failures, out
from postbus.cli.formats.output import Format, OutputFormat, print_objects, write_line

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

EPILOG: Final = examples(
    "postbus keys list                          rules of the namespace, without keys",
    "postbus keys list --entity orders --show   rules of a queue or topic, with keys",
    "postbus keys rotate reporting              new primary key; the old one still works",
    "postbus keys rotate reporting              again: now the old one is rejected",
)
CONNECTION_EPILOG: Final = examples(
    "postbus connection-string                  of the first rule with all rights",
    "postbus connection-string reader --entity orders",
    "postbus connection-string --endpoint sb://bus.example.org --context prod",
    'export POSTBUS_CONNECTION_STRING="$(postbus connection-string)"',
)
COLUMNS: Final = {
    "name": "rule",
    "rights": "rights",
    "primaryKey": "primary key",
    "secondaryKey": "secondary key",
    "from": "made by",
}

keys = typer.Typer(
    help="List authorization rules and rotate their keys.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
)
Entity = Annotated[
    str | None,
    typer.Option(
        "--entity",
        "-e",
        help="Queue or topic; default: the namespace.",
        autocompletion=complete_entities,
    ),
]


@keys.command("list", epilog=EPILOG)
def list_keys(
    entity: Entity = None,
    show: Annotated[bool, typer.Option("--show", help="Show the keys.")] = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """List authorization rules; keys are shown only with --show."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> list[dict[str, Any]]:
        return [_row(each, show=show) for each in await _rules(control, entity, keys=show)]

    with expected_failures():
        found = run_with(find_target(context), work)
        columns = COLUMNS if show else {k: v for k, v in COLUMNS.items() if not k.endswith("Key")}
        print_objects(found, output, columns, "no authorization rules")


@keys.command(epilog=EPILOG)
def rotate(
    rule: Annotated[str, typer.Argument(help="Name of an authorization rule.")],
    entity: Entity = None,
    context: ContextName = None,
) -> None:
    """Generate a new primary key; the old one replaces the secondary key."""
    from postbus.cli.client.control_client import part, run_with
    from postbus.process.data_directory import new_key

    async def work(control: ControlClient) -> None:
        found = _named(await _rules(control, entity, keys=True), rule)
        body = {
            "rights": found["rights"],
            "primaryKey": new_key(),
            "secondaryKey": found["primaryKey"],
        }
        await control.put(f"{await _at(control, entity)}/{part(found['name'])}", body)

    with expected_failures():
        run_with(find_target(context), work)
        out.print(
            f"{rule} has a new primary key; the old one is now the secondary and still works;"
            " rotate again when it is no longer in use",
            markup=False,
        )


def connection_string(
    rule: Annotated[
        str | None, typer.Argument(help="Authorization rule; default: that of the context.")
    ] = None,
    entity: Entity = None,
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", metavar="URL", help="Address for clients, sb://host[:port]."),
    ] = None,
    context: ContextName = None,
) -> None:
    """Print a connection string for the SDKs, on one line."""
    from postbus.cli.client.connection_strings import read_connection_string
    from postbus.cli.client.control_client import run_with
    from postbus.process.local_bus import connection_string

    with expected_failures():
        target = find_target(context)
        stored = target.context.connection_string or target.context.connection_string_file
        if rule is None and entity is None and endpoint is None and stored:
            write_line(target.connection_string())
            return
        said = f"Endpoint={endpoint}" if endpoint else target.endpoint
        if said is None and stored:
            answer = target.connection_string().split(";")
            said = ";".join(each for each in answer if not each.lower().startswith("sharedaccess"))
        if said is None:
            raise ContextError(
                f"the client endpoint of {target.origin} is unknown: add --endpoint sb://HOST"
            )

        async def work(control: ControlClient) -> dict[str, Any]:
            return _named(await _rules(control, entity, keys=True), rule)

        found = run_with(target, work)
        text = connection_string(said, found["name"], found["primaryKey"])
        text += f";EntityPath={entity}" if entity and "EntityPath=" not in text else ""
        read_connection_string(text)
        write_line(text)


async def _at(control: ControlClient, entity: str | None) -> str:
    """Return the control API's path of the rules of an entity or of the namespace."""
    from postbus.cli.commands.entities import find_entity

    path = "/v1" if entity is None else (await find_entity(control, entity))[0]
    return f"{path}/authorization-rules"


async def _rules(control: ControlClient, entity: str | None, *, keys: bool) -> list[dict[str, Any]]:
    answer = await control.get(await _at(control, entity), keys=keys)
    found: list[dict[str, Any]] = answer["items"]
    return found


def _named(found: list[dict[str, Any]], rule: str | None) -> dict[str, Any]:
    """Return the rule with this name; without a name the first with all rights."""
    for each in found:
        if each["name"] == rule or (rule is None and "Manage" in each["rights"]):
            return each
    known = ", ".join(each["name"] for each in found) or "none"
    what = "with all rights" if rule is None else rule
    raise RefusedError(f"no authorization rule {what}; existing rules: {known}")


def _row(answer: dict[str, Any], *, show: bool) -> dict[str, Any]:
    row = {"name": answer["name"], "rights": ", ".join(answer["rights"])}
    if show:
        row |= {"primaryKey": answer["primaryKey"], "secondaryKey": answer["secondaryKey"]}
    return {**row, "from": "manifest" if answer["isDeclared"] else "bus"}
