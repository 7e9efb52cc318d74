"""Entities of a bus: `get`, `describe`, `delete`, `restore` and `status`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from postbus.cli.client.contexts import ContextName, find_target
from postbus.cli.commands.watching import watched, with_availability
from postbus.cli.completion import complete_entities, did_you_mean
from postbus.cli.failures import RefusedError, err, examples, expected_failures, out
from postbus.cli.formats.output import Format, OutputFormat, Yes, asks_yes, print_objects

if TYPE_CHECKING:
    from postbus.cli.client.control_client import ControlClient

GET_EPILOG: Final = examples(
    "postbus get queues                       with message counts",
    "postbus get queue orders                 one queue",
    "postbus get queues --watch               repeat, with rates and ages",
    "postbus get queues -o wide               rates and age of the oldest message",
    "postbus get topics -o json",
    "postbus get subscriptions order-events",
    "postbus get rules order-events large-orders",
    "postbus get rules order-events/Subscriptions/large-orders",
    "postbus get deleted                      restorable entities",
    "postbus get namespace -o yaml",
)
DESCRIBE_EPILOG: Final = examples(
    "postbus describe orders",
    "postbus describe order-events/Subscriptions/large-orders -o json",
)
DELETE_EPILOG: Final = examples(
    "postbus delete orders                    asks for confirmation",
    "postbus delete orders --yes --policy DeleteIfEmpty",
    "postbus delete orders --policy Retain    keep its messages for a restore",
    "postbus delete order-events/Subscriptions/everything --yes",
)
RESTORE_EPILOG: Final = examples(
    "postbus get deleted                      restorable entities with their numbers",
    "postbus restore orders                   the latest deleted one with this name",
    "postbus restore 7                        by number",
)
STATUS_EPILOG: Final = examples("postbus status", "postbus status --context prod -o json")


class ObjectKind(StrEnum):
    """Kinds of objects to list."""

    QUEUES = "queues"
    TOPICS = "topics"
    SUBSCRIPTIONS = "subscriptions"
    RULES = "rules"
    NAMESPACE = "namespace"
    DELETED = "deleted"


def read_kind(text: str) -> ObjectKind:
    """Return the kind for a word, plural or singular: `queues`, `queue`."""
    known = {
        **{each.value: each for each in ObjectKind},
        **{each.value[:-1]: each for each in ObjectKind},
    }
    known["namespace"] = ObjectKind.NAMESPACE
    if text.lower() in known:
        return known[text.lower()]
    near = difflib.get_close_matches(text.lower(), known, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise typer.BadParameter(f"use {', '.join(ObjectKind)}{hint}")


Entity = Annotated[
    str,
    typer.Argument(
        help="Queue, topic, or topic/Subscriptions/name.", autocompletion=complete_entities
    ),
]


class Policy(StrEnum):
    """Policies for the messages of a deleted entity."""

    DELETE = "Delete"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    RETAIN = "Retain"


COUNTS: Final = {
    "active": "activeMessageCount",
    "deadLetter": "deadLetterMessageCount",
    "scheduled": "scheduledMessageCount",
}
NOT_COUNTED: Final[dict[str, Any]] = {
    "countDetails": {},
    "sizeInBytes": None,
    "availability": "Limited",
}
COLUMNS: Final = {
    "name": "name",
    "status": "status",
    "active": "active",
    "deadLetter": "dead-letter",
    "scheduled": "scheduled",
    "sizeInBytes": "bytes",
}


WIDE_COLUMNS: Final = {
    **COLUMNS,
    "incomingRate": "in/s",
    "outgoingRate": "out/s",
    "oldestAge": "oldest",
}


COUNTED: Final = frozenset({ObjectKind.QUEUES, ObjectKind.TOPICS, ObjectKind.SUBSCRIPTIONS})
SUBSCRIPTIONS_HINT: Final = "; subscriptions are topic/Subscriptions/name"


def get(
    kind: Annotated[
        ObjectKind,
        typer.Argument(
            parser=read_kind,
            metavar="KIND",
            help=f"What to list: {', '.join(ObjectKind)}; also in the singular.",
            autocompletion=lambda: list(ObjectKind),
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a queue or topic; for subscriptions and rules their topic.",
            autocompletion=complete_entities,
        ),
    ] = None,
    subscription: Annotated[
        str | None, typer.Argument(help="For rules: their subscription.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat every two seconds, with rates.")
    ] = False,
    output: OutputFormat = Format.TABLE,
    context: ContextName = None,
) -> None:
    """List entities of the bus."""
    from postbus.cli.client.control_client import run_with

    wanted = {ObjectKind.SUBSCRIPTIONS: 1, ObjectKind.RULES: 2}.get(kind, 0)
    names = [each for each in (name, subscription) if each is not None]
    is_one = kind in {ObjectKind.QUEUES, ObjectKind.TOPICS} and len(names) == 1
    only = names.pop() if is_one else None
    if watch and (kind not in COUNTED or not output.is_table):
        raise typer.BadParameter("--watch is for tables of queues, topics and subscriptions")
    if kind is ObjectKind.RULES and len(names) == 1:
        names = _topic_and_subscription(names[0])
    if len(names) != wanted:
        needs = ["no more than a name", "a topic", "a topic and a subscription"]
        raise typer.BadParameter(f"{kind.value} needs {needs[wanted]}")

    async def work(control: ControlClient) -> Any:
        match kind:
            case ObjectKind.QUEUES | ObjectKind.TOPICS:
                return await _counted(control, f"/v1/{kind.value}", only)
            case ObjectKind.SUBSCRIPTIONS:
                return await _counted(control, f"{_topic(names[0])}/subscriptions")
            case ObjectKind.RULES:
                return await _rules(control, *names)
            case ObjectKind.DELETED:
                return await _tombstones(control)
            case ObjectKind.NAMESPACE:
                answer = await control.get("/v1/namespace")
                if not output.is_table:
                    return answer
                rules = await control.get("/v1/authorization-rules")
                return _namespace_row(answer, rules["items"])

    with expected_failures():
        target = find_target(context)
        if watch:
            run_with(target, lambda control: watched(lambda: work(control), output))
        found = run_with(target, work)
        if kind in COUNTED:
            _print_counted(found, output, f"no {kind.value}")
        else:
            is_deleted = kind is ObjectKind.DELETED
            empty = "no restorable entities" if is_deleted else f"no {kind.value}"
            print_objects(found, output, None, empty)


def _print_counted(rows: list[dict[str, Any]], output: Format, empty: str) -> None:
    """Print entities, and each reason for missing counts once."""
    columns = WIDE_COLUMNS if output is Format.WIDE else COLUMNS
    print_objects(rows, output, with_availability(columns, rows), empty)
    for reason in sorted({each["unavailableReason"] for each in rows} - {None}):
        err.print(f"[yellow]postbus:[/yellow] not counted: {escape(reason)}")


def describe(
    entity: Entity,
    output: OutputFormat = Format.YAML,
    context: ContextName = None,
) -> None:
    """Show one entity: its definition, counts and partitions."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> dict[str, Any]:
        path, found = await find_entity(control, entity)
        runtime = await control.get(f"{path}/runtime")
        return {**found, "runtime": runtime}

    with expected_failures():
        print_objects(run_with(find_target(context), work), output)


def delete(
    entity: Entity,
    policy: Annotated[
        Policy, typer.Option("--policy", help="What happens to the messages.")
    ] = Policy.DELETE,
    yes: Yes = False,
    context: ContextName = None,
) -> None:
    """Delete an entity; asks for confirmation on a terminal."""
    from postbus.cli.client.control_client import run_with

    async def look(control: ControlClient) -> tuple[str, str, dict[str, Any]]:
        path, found = await find_entity(control, entity)
        return path, str(found.get("path", found["name"])), await control.get(f"{path}/runtime")

    async def work(control: ControlClient) -> dict[str, Any]:
        answer: dict[str, Any] = await control.delete(path, policy=policy.value)
        return answer

    with expected_failures():
        target = find_target(context)
        path, name, runtime = run_with(target, look)
        asks_yes(f"Delete {name}{messages_of(runtime, policy)}?", is_sure=yes)
        answer = run_with(target, work)
        text = f"deleted {name}"
        if answer["restorable"]:
            text += f"; to restore it: postbus restore {answer['entityId']}"
        out.print(text, markup=False)


def messages_of(runtime: Mapping[str, Any], policy: Policy) -> str:
    """Return the part of the confirmation that says what happens to the messages."""
    count = int(runtime["messageCount"])
    kept = "are kept for a restore" if policy is Policy.RETAIN else "are lost"
    if runtime.get("unavailablePartitions"):  # absent in answers of older versions
        known = f"at least {count}" if count else "an unknown number of"
        return f" and {known} messages, which {kept}"
    if count == 1:
        return f" and its message, which {kept.replace('are', 'is', 1)}"
    return f" and its {count} messages, which {kept}" if count else ""


def restore(
    entity: Annotated[str, typer.Argument(help="Entity number, or its former name.")],
    context: ContextName = None,
) -> None:
    """Restore an entity that was deleted with --policy Retain, with its messages."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> tuple[str, int]:
        found = [
            each
            for each in await _tombstones(control)
            if entity in {str(each["entityId"]), each["name"]}
            or entity.lower() == each["name"].lower()
        ]
        if not found:
            raise RefusedError(f"no restorable entity {entity}: see postbus get deleted")
        number = int(found[-1]["entityId"])
        await control.post(f"/v1/deleted/{number}/restore")
        return str(found[-1]["name"]), number

    with expected_failures():
        name, number = run_with(find_target(context), work)
        out.print(f"restored {name} ({number})", markup=False)


def status(output: OutputFormat = Format.TABLE, context: ContextName = None) -> None:
    """Show the state of the broker and its partitions; exits with 1 if there is a problem."""
    from postbus.cli.client.control_client import run_with

    async def work(control: ControlClient) -> dict[str, Any]:
        answer: dict[str, Any] = await control.get("/v1/status")
        return answer

    with expected_failures():
        answer = run_with(find_target(context), work)
        if not output.is_table:
            print_objects(answer, output)
        else:
            _print_status(answer)
        if answer["troubles"] or not answer["isReady"]:
            raise typer.Exit(1)


def _print_status(answer: dict[str, Any]) -> None:
    partitions = answer["partitions"]
    in_use = [each for each in partitions if each["status"] == "active"]
    shown = {
        "bus": answer["namespace"],
        "broker": f"{answer['broker']} ({answer['programVersion']})",
        "ready": "yes" if answer["isReady"] else "no",
        "catalog": f"version {answer['version']}",
        "partitions": f"{len(in_use)} of {len(partitions)} in use",
    }
    for at, trouble in enumerate(answer["troubles"], 1):
        shown[f"trouble {at}"] = trouble
    print_objects(shown, Format.TABLE)


def _namespace_row(answer: dict[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a namespace with each value short enough for a line."""
    said = answer["properties"]
    shown = (f"{each['name']} ({', '.join(each['rights'])})" for each in rules)
    return {
        "name": answer["name"],
        "sku": said["sku"]["name"],
        "partitions": answer["partitionCount"],
        "catalog": f"version {answer['version']}",
        "minimumTlsVersion": said["minimumTlsVersion"],
        "disableLocalAuth": "yes" if said["disableLocalAuth"] else "no",
        "authorizationRules": ", ".join(shown),
    }


# --- asking -------------------------------------------------------------------------------------


def _topic_and_subscription(path: str) -> list[str]:
    from postbus.contract.entities import is_subscription_path, topic_of

    return [topic_of(path), path.rpartition("/")[2]] if is_subscription_path(path) else [path]


def _topic(name: str) -> str:
    from postbus.cli.client.control_client import part

    return f"/v1/topics/{part(name)}"


async def find_entity(control: ControlClient, name: str) -> tuple[str, dict[str, Any]]:
    """Return an entity's path in the control API, and its description."""
    from postbus.cli.client.control_client import NotFoundError, part
    from postbus.contract.entities import is_subscription_path, topic_of

    if is_subscription_path(name):
        path = f"{_topic(topic_of(name))}/subscriptions/{part(name.rpartition('/')[2])}"
        return path, await control.get(path)
    path = f"/v1/queues/{part(name)}"
    try:
        return path, await control.get(path)
    except NotFoundError:
        path = _topic(name)
    try:
        return path, await control.get(path)
    except NotFoundError:
        hint = await did_you_mean(control, name)
        raise NotFoundError(
            f"there is no queue or topic {name}{hint or SUBSCRIPTIONS_HINT}"
        ) from None


async def _counted(
    control: ControlClient, path: str, only: str | None = None
) -> list[dict[str, Any]]:
    """Return entities with their counts, one row each; `only`: the name of a single one.

    Counts are None, and `unavailableReason` says why, where all partitions are unavailable.
    """
    from postbus.cli.client.control_client import NotFoundError, UnavailableError, part

    if only is None:
        found = await control.all_of(path)
    else:
        try:
            found = [await control.get(f"{path}/{part(only)}")]
        except NotFoundError as error:
            raise NotFoundError(f"{error}{await did_you_mean(control, only)}") from None
    rows = []
    for each in found:
        try:
            runtime = await control.get(f"{path}/{part(each['name'])}/runtime")
        except UnavailableError as error:
            runtime = NOT_COUNTED | {"reason": str(error)}
        details = runtime["countDetails"]
        rows.append(
            {
                "name": each["name"],
                "status": each["properties"]["status"],
                **{name: details.get(key) for name, key in COUNTS.items()},
                "sizeInBytes": runtime["sizeInBytes"],
                **traffic_of(runtime),
                "availability": runtime["availability"],
                "unavailableReason": runtime.get("reason"),
                "entityId": each["entityId"],
                "properties": each["properties"],
            }
        )
    return rows


def traffic_of(runtime: dict[str, Any]) -> dict[str, Any]:
    """Return an entity's rates and ages for people; empty for a bus of an older version."""
    rates = runtime.get("rates") or {}
    age_s = runtime.get("oldestMessageAgeSeconds")
    return {
        "incomingRate": rate(rates.get("incoming")),
        "outgoingRate": rate(rates.get("outgoing")),
        "oldestAge": None if age_s is None else age(age_s),
    }


def rate(per_second: float | None) -> str | None:
    """Return messages per second, with one decimal where it matters."""
    if per_second is None:
        return None
    text = f"{per_second:.1f}" if per_second < 100 else f"{per_second:.0f}"
    return text.removesuffix(".0")


def age(seconds: float) -> str:
    """Return an age in its largest unit: 12s, 3m, 5h, 2d."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:.0f}s"


async def _rules(control: ControlClient, topic: str, subscription: str) -> list[dict[str, Any]]:
    from postbus.cli.client.control_client import part

    path = f"{_topic(topic)}/subscriptions/{part(subscription)}/rules"
    rows = []
    for each in await control.all_of(path):
        said = each["properties"]
        selects = said.get("sqlFilter") or {}
        rows.append(
            {
                "name": each["name"],
                "filter": selects.get("sqlExpression") or _sparse(said.get("correlationFilter")),
                "action": (said.get("action") or {}).get("sqlExpression"),
            }
        )
    return rows


def _sparse(said: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (said or {}).items() if value not in (None, {})}


async def _tombstones(control: ControlClient) -> list[dict[str, Any]]:
    """Return the restorable entities, oldest first."""
    answer = await control.get("/v1/tombstones")
    return [
        {
            name: each[name]
            for name in ("entityId", "kind", "name", "reason", "deletedAt", "restorableUntil")
        }
        for each in answer["items"]
        if each["restorableUntil"] is not None
    ]
