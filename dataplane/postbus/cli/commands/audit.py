"""`postbus audit`: manual changes and who made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.failures import examples, expected_failures, out
from postbus.cli.formats.output import Format, OutputFormat, print_objects

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

EPILOG: Final = examples(
    "postbus audit                            the latest 20 changes",
    "postbus audit --entity orders --count 100",
    'postbus audit --caller "token ci"',
    "postbus audit --before 1200 -o json      with all details",
)
COLUMNS: Final = {
    "begunAt": "time",
    "caller": "caller",
    "verb": "what",
    "entity": "entity",
    "shown": "came to",
}
PAGE: Final = 500


def audit(
    entity: Annotated[
        str | None,
        typer.Option("--entity", help="Only changes of this queue, topic or subscription."),
    ] = None,
    caller: Annotated[
        str | None,
        typer.Option("--caller", help="Only changes by this caller, such as `token ci`."),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", help="Maximum number of changes.", min=1)
    ] = 20,
    before: Annotated[
        int | None, typer.Option("--before", help="Only changes with lower numbers.", min=1)
    ] = None,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """List manual changes of definitions, keys and messages, newest first."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> tuple[list[dict[str, Any]], int | None]:
        found: list[dict[str, Any]] = []
        following = before
        while len(found) < count:
            top = min(count - len(found), PAGE)
            answer = await control.get(
                "/v1/audit", before=following, top=top, entity=entity, caller=caller
            )
            found += answer["items"]
            following = answer["nextBefore"]
            if following is None:
                break
        return found, following

    with expected_failures():
        found, following = run_with(find_target(context), work)
        if output is not Format.TABLE:
            print_objects(found, output)
            return
        rows = [{**each, "shown": _shown(each)} for each in found]
        print_objects(rows, output, COLUMNS, empty="no manual changes")
        if following is not None:
            out.print(f"{len(found)} shown; for more use --before {following}", markup=False)


def _shown(line: dict[str, Any]) -> str:
    """Return the result of a change in a few words."""
    outcome = line["outcome"] or "in progress or unknown"
    detail = line["detail"]
    counts = [f"{count} {name}" for name, count in detail.get("counts", {}).items() if count]
    said = [f"where {detail['where']}"] if "where" in detail else []
    said += [f"{name} {detail[name]}" for name in ("rule", "entityId", "to") if name in detail]
    said += [", ".join(detail["rules"])] if "rules" in detail else []
    said += ["edited " + ", ".join(detail["edited"])] if "edited" in detail else []
    return "; ".join([outcome if outcome != "done" or not counts else ", ".join(counts), *said])
