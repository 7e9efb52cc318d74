"""Commands for manifests: `apply`, `diff`, `export` and `import`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.failures import (
    Exit,
    InputError,
    RefusedError,
    err,
    examples,
    expected_failures,
    out,
)
from postbus.cli.formats.output import (
    Format,
    OutputFormat,
    as_yaml_documents,
    print_objects,
    write_line,
)

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient
    from postbus.cli.commands.applying import Plan
    from postbus.manifests.reader import BusDefinition

APPLY_EPILOG: Final = examples(
    "postbus apply examples/              all manifests of a folder",
    "postbus apply queue.yaml --dry-run   show the changes, make none",
    "postbus diff queue.yaml && echo same",
    "postbus apply queue.yaml --context prod -o json",
)
DIFF_EPILOG: Final = examples(
    "postbus diff examples/               the changes that apply would make",
    "postbus diff examples/ --context prod",
)
EXPORT_EPILOG: Final = examples(
    "postbus export > bus.yaml            all entities, without messages and keys",
    "postbus export --file bus.yaml",
    "postbus export | postbus apply - --context other",
)
IMPORT_EPILOG: Final = examples(
    "postbus import Config.json > bus.yaml    manifests for an emulator configuration",
    "postbus import Config.json --apply       apply them directly",
)
Manifests = Annotated[
    list[Path], typer.Argument(help="Manifest files, or folders of *.yaml; - is stdin.")
]
COLORS: Final = {"+": "green", "-": "red", "@": "cyan"}
KEYS_REMARK: Final = "# Messages and keys are not exported; they stay in the bus.\n"
PUBLIC_KEY_REMARK: Final = """\
# SAS_KEY_VALUE is the publicly known key of Microsoft's emulator. Use it on your own machine only;
# without the Secret and secretName the bus generates keys.
"""


def apply(
    manifests: Manifests,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes, make none.")
    ] = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """Create and change entities to match manifests; never delete any."""
    from postbus.cli.client.control_client import run_with
    from postbus.cli.commands.applying import make_plan

    async def work(control: ControlClient) -> None:
        await _apply(control, await make_plan(control, manifests), output, dry_run=dry_run)

    with expected_failures():
        run_with(find_target(context), work)


def diff(manifests: Manifests, context: ContextName = None) -> None:
    """Show what `apply` would change; exits with 1 if there are changes."""
    from postbus.cli.client.control_client import run_with
    from postbus.cli.commands.applying import make_plan

    async def work(control: ControlClient) -> bool:
        plan = await make_plan(control, manifests)
        found = [lines for lines in plan.differences() if lines]
        for line in (line for lines in found for line in lines):
            color = COLORS.get(line[:1])
            is_title = line.startswith(("---", "+++"))
            style = "bold" if is_title else color
            out.print(f"[{style}]{escape(line)}[/{style}]" if style else escape(line))
        return bool(found)

    with expected_failures():
        if run_with(find_target(context), work):
            raise typer.Exit(Exit.DIFFERENT)


def export(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Output file; default: standard output.")
    ] = None,
    context: ContextName = None,
) -> None:
    """Write manifests of all definitions in the bus, for `apply`."""
    from postbus.cli.client.control_client import run_with
    from postbus.cli.client.live_namespace import read_namespace

    with expected_failures():
        _write(run_with(find_target(context), read_namespace), file)


def import_config(
    file: Annotated[Path, typer.Argument(help="Config.json of Microsoft's emulator.")],
    is_applied: Annotated[
        bool, typer.Option("--apply", help="Apply the manifests instead of printing them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --apply: show the changes, make none.")
    ] = False,
    context: ContextName = None,
) -> None:
    """Convert a configuration of Microsoft's Service Bus emulator to manifests."""
    from postbus.cli.formats.emulator_config import read_emulator_config

    with expected_failures():
        imported = read_emulator_config(file)
        for remark in imported.remarks:
            err.print(f"[yellow]postbus:[/yellow] {escape(remark)}")
        _check(imported.definition)
        if is_applied:
            from postbus.cli.client.control_client import run_with
            from postbus.cli.commands.applying import plan_of

            async def work(control: ControlClient) -> None:
                plan = await plan_of(control, imported.definition, {("Namespace", "")})
                await _apply(control, plan, Format.TABLE, dry_run=dry_run)

            run_with(find_target(context), work)
            remark = "the keys of the bus stay: see postbus connection-string"
        else:
            _write(imported.definition, None, PUBLIC_KEY_REMARK)
            remark = (
                "connection strings for the emulator work: the Secret has its public key"
                " SAS_KEY_VALUE; use it on your own machine only"
            )
        err.print(f"[yellow]postbus:[/yellow] {remark}")


async def _apply(control: ControlClient, plan: Plan, output: Format, *, dry_run: bool) -> None:
    from postbus.cli.commands.applying import carry_out

    if plan.live_name != plan.wanted.name and output.is_table:
        err.print(
            f"[yellow]postbus:[/yellow] the manifests are for {escape(plan.wanted.name)}, but are"
            f" applied to the bus {escape(plan.live_name)}"
        )
    shown = [*(each.shown() for each in plan.changes), *(each.shown() for each in plan.rules)]
    if not dry_run:
        shown = await carry_out(control, plan)
    if output.is_table:
        _print_changes(shown, dry_run=dry_run)
    else:
        print_objects(shown, output)
    refused = [each for each in shown if each["change"] == "refused"]
    if refused:
        raise RefusedError("\n".join(f"{each['name']}: {each['why']}" for each in refused))


def _print_changes(shown: list[dict[str, Any]], *, dry_run: bool) -> None:
    for each in sorted(shown, key=lambda each: bool(each["kind"] == "subscription")):
        if each["change"] in {"created", "changed"}:
            what = f"{each['kind']} {each['name']}"
            change = each["change"]
            line = f"{what} would be {change}" if dry_run else f"{change} {what}"
            fields = ", ".join(each.get("fields", ()))
            out.print(f"{line}: {fields}" if fields else line, markup=False)
    same = sum(each["change"] == "unchanged" for each in shown)
    parts = [f"{len(shown) - same} {'to do' if dry_run else 'done'}"] if len(shown) > same else []
    out.print(", ".join([*parts, f"{same} unchanged"] if same or not parts else parts))


def _check(definition: BusDefinition) -> None:
    """Read the manifests as `apply` does; raises `ManifestError` for what it would refuse."""
    from postbus.cli.formats.manifest_text import manifests_of
    from postbus.contract.yaml_documents import parse_documents
    from postbus.manifests.reader import read_one_bus

    text = as_yaml_documents(list(manifests_of(definition)))
    read_one_bus([], list(parse_documents(text, "the configuration")))


def _write(definition: BusDefinition, file: Path | None, remark: str = KEYS_REMARK) -> None:
    from postbus.cli.formats.manifest_text import manifests_of

    found: list[Any] = list(manifests_of(definition))
    text = remark + as_yaml_documents(found)
    if file is None or str(file) == "-":
        write_line(text.rstrip("\n"))
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: {(error.strerror or 'cannot be written').lower()}") from None
    sys.stderr.write(f"{len(found)} manifests in {file}\n")
