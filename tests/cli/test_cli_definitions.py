"""`apply`, `diff`, `export`, `get`, `describe`, `delete`, `restore`, `status`, as processes."""

from __future__ import annotations

import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from postbus.cli.formats.output import Format, print_objects
from tests.cli.command_line import CommandLine, folder_with_bus
from tests.dev_bus import LIMIT_S, ROOT

NAMESPACE = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: local-bus}
spec:
  authorizationRules:
    - {name: reader, rights: [Listen]}
"""
QUEUE = """
apiVersion: postbus.dev/v1alpha1
kind: Queue
metadata: {name: %s}
spec: {owner: {name: local-bus}%s}
"""


@pytest.fixture(scope="module")
def user() -> Iterator[CommandLine]:
    """Run a bus in a folder until the module's tests are done; the examples are beside it."""
    with folder_with_bus() as user:
        for name in ("queues.yaml", "topics.yaml"):
            shutil.copy(ROOT / "examples" / name, user.folder)
        (user.folder / "bus.yaml").write_text(NAMESPACE.replace("local-bus", "example-bus"))
        yield user


def write(user: CommandLine, name: str, *texts: str) -> str:
    (user.folder / name).write_text("---\n".join(texts))
    return name


EXAMPLES = ("bus.yaml", "queues.yaml", "topics.yaml")


@pytest.mark.slow
def test_apply_diff_and_export_agree(user: CommandLine) -> None:
    planned = user.json("apply", *EXAMPLES, "--dry-run")
    created = {each["name"] for each in planned if each["change"] == "created"}
    assert created == {
        "orders", "billing/invoices", "order-events", "order-events/Subscriptions/everything",
        "order-events/Subscriptions/large-orders", "order-events/Subscriptions/europe", "reader",
    }  # fmt: skip
    assert [each["name"] for each in user.json("get", "queues")] == ["queue.1"]
    done = user.run("diff", *EXAMPLES)
    assert done.returncode == 1
    assert "+  lockDuration: PT30S" in done.stdout
    output = user.ok("apply", *EXAMPLES)
    assert "created queue orders\n" in output
    assert user.ok("apply", *EXAMPLES) == "8 unchanged\n"
    assert user.run("diff", *EXAMPLES).stdout == ""
    exported = user.ok("export")
    documents = list(yaml.safe_load_all(exported))
    assert [each["kind"] for each in documents] == [
        "Namespace", "Queue", "Queue", "Queue", "Topic",
        "Subscription", "Subscription", "Subscription",
    ]  # fmt: skip
    write(user, "exported.yaml", exported)
    assert "unchanged" in user.ok("apply", "exported.yaml")
    assert user.run("diff", "exported.yaml").returncode == 0
    user.ok("export", "--file", "again.yaml")
    assert (user.folder / "again.yaml").read_text() == exported
    assert user.run("check", "again.yaml").returncode == 0
    changed = exported.replace("lockDuration: PT30S", "lockDuration: PT45S")
    write(user, "changed.yaml", changed)
    done = user.run("diff", "changed.yaml")
    lines = [line for line in done.stdout.splitlines() if re.match("[-+] ", line)]
    assert (done.returncode, lines) == (1, ["-  lockDuration: PT30S", "+  lockDuration: PT45S"])
    assert user.ok("apply", "changed.yaml").startswith("changed queue orders: lockDuration\n")
    assert user.json("describe", "orders")["properties"]["lockDuration"] == "PT45S"


@pytest.mark.slow
def test_export_recreates_all_entities(user: CommandLine) -> None:
    user.ok("apply", *EXAMPLES)
    exported = user.ok("export")
    for kind in ("queues", "topics"):
        for each in user.json("get", kind):
            user.ok("delete", each["name"], "--yes")
    assert [each["kind"] for each in yaml.safe_load_all(user.ok("export"))] == ["Namespace"]
    write(user, "exported.yaml", exported)
    user.ok("apply", "exported.yaml")
    assert user.ok("export") == exported


@pytest.mark.slow
def test_one_queue_is_applied_without_the_rest(user: CommandLine) -> None:
    write(user, "one.yaml", QUEUE % ("forwarder", ", forwardTo: queue.1"))
    assert user.ok("apply", "one.yaml") == "created queue forwarder\n1 done\n"
    write(user, "lost.yaml", QUEUE % ("lost", ", forwardTo: nowhere"))
    user.fails("apply", "lost.yaml", code=4, says=r"lost\.yaml:.*no queue or topic nowhere")
    a, b = QUEUE % ("a", ", forwardDeadLetteredMessagesTo: b"), QUEUE % (
        "b", ", forwardDeadLetteredMessagesTo: a",
    )  # fmt: skip
    write(user, "round.yaml", a, b)
    output = user.ok("apply", "round.yaml").splitlines()
    assert sorted(output) == ["2 done", "created queue a", "created queue b"]
    assert user.ok("apply", "round.yaml") == "2 unchanged\n"


@pytest.mark.slow
def test_manifests_are_read_from_standard_input(user: CommandLine) -> None:
    exported = user.ok("export")
    assert user.ok("apply", "-", stdin=exported).endswith(" unchanged\n")
    assert user.ok("diff", "-", stdin=exported) == ""
    assert user.ok("check", "-", stdin=exported).startswith("ok local-bus (Standard)")
    user.fails("apply", "-", stdin="kind: [", code=4, says="standard input:1: no valid YAML")
    for command in ("apply", "diff", "check"):
        user.fails(command, "-", stdin="# nothing\n", code=4, says="no manifests found")


@pytest.mark.slow
def test_wrong_scheme_of_the_control_api_is_reported(user: CommandLine) -> None:
    (control,) = re.findall(r"(?m)^control +http://(\S+)$", user.announced)
    user.ok("context", "set", "secure", "--control", f"https://{control}")
    user.fails("status", "--context", "secure", code=7, says="does not use TLS")
    user.ok("context", "set", "bare", "--control", f"http://{control}")
    user.fails("status", "--context", "bare", code=7, says="postbus context set NAME --token-file")


@pytest.mark.slow
def test_printed_lines_have_no_trailing_spaces(user: CommandLine) -> None:
    printed = user.announced + user.ok("get", "namespace") + user.ok("get", "queues")
    assert [line for line in printed.splitlines() if line.endswith(" ")] == []
    assert re.search(r"(?m)^authorizationRules  .*RootManageSharedAccessKey \(", printed)


@pytest.mark.slow
def test_invalid_manifests_change_nothing(user: CommandLine) -> None:
    before = user.ok("export")
    write(user, "bad.yaml", QUEUE % ("fine", ""), QUEUE % ("bad", ", lockDuration: PT1H"))
    user.fails("apply", "bad.yaml", code=4, says=r"bad\.yaml:\d+: spec\.lockDuration: must be")
    write(user, "born.yaml", QUEUE % ("fine2", ""), QUEUE % ("queue.1", ", requiresSession: true"))
    user.fails(
        "apply", "born.yaml", code=4, says="queue queue.1: requiresSession: cannot be changed"
    )
    user.fails("diff", "absent.yaml", code=4, says="absent.yaml: no such file")
    premium = NAMESPACE + "  sku: {name: Premium}\n"
    write(user, "premium.yaml", premium)
    user.fails("apply", "premium.yaml", code=4, says="is Standard: change it with PUT")
    user.fails("export", "--file", "absent/x", code=4, says="absent/x: no such file")
    assert user.ok("export") == before


@pytest.mark.slow
def test_changed_start_key_is_refused_after_all_other_changes(
    user: CommandLine,
) -> None:
    rule = "{name: RootManageSharedAccessKey, rights: [Listen]}"
    namespace = NAMESPACE.replace("{name: reader, rights: [Listen]}", rule)
    write(user, "rule.yaml", namespace, QUEUE % ("beside", ""))
    says = "RootManageSharedAccessKey: a manifest declares"
    user.fails("apply", "rule.yaml", code=7, says=says)
    assert user.json("describe", "beside")["name"] == "beside"


@pytest.mark.slow
def test_imported_configuration_is_applied(user: CommandLine) -> None:
    config = """{"UserConfig": {"Namespaces": [{"Name": "sbemulatorns", "Queues": [
        {"Name": "imported", "Properties": {"MaxDeliveryCount": 3}}]}]}}"""
    write(user, "Config.json", config)
    done = user.ok("import", "Config.json", "--apply", "--dry-run")
    assert done == "queue imported would be created\n1 to do\n"
    assert "created queue imported" in user.ok("import", "Config.json", "--apply")
    assert user.json("describe", "imported")["properties"]["maxDeliveryCount"] == 3


# --- looking ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_get_lists_entities_with_counts(user: CommandLine) -> None:
    user.ok("apply", *EXAMPLES)
    user.ok("send", "orders", "x", "--repeat", "3")
    user.lines("receive", "orders", "--to-dead-letter")
    rows = {each["name"]: each for each in user.json("get", "queues")}
    counts = {name: rows["orders"][name] for name in ("active", "deadLetter", "scheduled")}
    assert counts == {"active": 2, "deadLetter": 1, "scheduled": 0}
    table = user.ok("get", "queues")
    assert re.search(r"^orders +Active +2 +1 +0", table, re.MULTILINE)
    assert [each["name"] for each in user.json("get", "topics")] == ["order-events"]
    names = [each["name"] for each in user.json("get", "subscriptions", "order-events")]
    assert names == ["europe", "everything", "large-orders"]
    (rule,) = user.json("get", "rules", "order-events", "large-orders")
    assert rule["filter"] == "amount > 1000 AND sys.Label = 'placed'"
    assert "SET priority = 'high'" in user.ok("get", "rules", "order-events", "large-orders")
    assert user.json("get", "namespace")["name"] == "local-bus"
    assert yaml.safe_load(user.ok("get", "namespace", "-o", "yaml"))["partitionCount"] == 16
    shown = user.ok("describe", "order-events/Subscriptions/europe")
    assert "  autoDeleteOnIdle: P10675199DT2H48M5.4775807S  # never\n" in shown
    described = yaml.safe_load(shown)
    assert described["properties"]["autoDeleteOnIdle"] == "P10675199DT2H48M5.4775807S"
    assert described["properties"]["forwardTo"] == "orders"
    assert described["runtime"]["messageCount"] == 0
    assert user.json("describe", "billing/invoices")["name"] == "billing/invoices"


@pytest.mark.slow
def test_invalid_names_and_arguments_are_refused(user: CommandLine) -> None:
    user.fails("describe", "nobody", code=7, says="there is no queue or topic nobody")
    user.fails("describe", "order-events/Subscriptions/nobody", code=7, says="nobody")
    user.fails("get", "subscriptions", code=2, says="subscriptions needs a topic")
    user.fails("get", "queues", "x", code=7, says="there is no queue x")
    user.fails("get", "queues", "x", "y", code=2, says="queues needs no more than a name")
    user.fails("get", "cats", code=2, says="use queues, topics, subscriptions")
    user.fails("get", "subscriptions", "nobody", code=7, says="nobody")
    user.fails("restore", "nobody", code=7, says="no restorable entity nobody")
    user.fails("delete", "nobody", "--yes", code=7, says="there is no queue or topic nobody")


@pytest.mark.slow
def test_status_shows_the_bus_and_its_partitions(user: CommandLine) -> None:
    status = user.json("status")
    assert (status["namespace"], status["isReady"], status["troubles"]) == ("local-bus", True, [])
    assert "ready       yes" in user.ok("status")


# --- deleting -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_delete_requires_confirmation_and_can_keep_non_empty_entities(user: CommandLine) -> None:
    write(user, "q.yaml", QUEUE % ("goner", ""))
    user.ok("apply", "q.yaml")
    user.ok("send", "goner", "x")
    user.fails(
        "delete", "goner", code=2, says="cannot ask for confirmation without a terminal: add --yes"
    )
    user.fails("delete", "goner", "--yes", "--policy", "DeleteIfEmpty", code=7, says="message")
    assert user.json("describe", "goner")["runtime"]["messageCount"] == 1
    assert user.ok("delete", "goner", "--yes") == "deleted goner\n"
    user.fails("describe", "goner", code=7, says="goner")


@pytest.mark.slow
def test_terminal_is_asked_for_confirmation(user: CommandLine) -> None:
    write(user, "q.yaml", QUEUE % ("asked", ""))
    user.ok("apply", "q.yaml")
    for answer, code in (("n", 1), ("y", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        done = subprocess.run(
            [sys.executable, "-m", "postbus", "delete", "asked"],
            cwd=user.folder, env=user.environment(), stdin=theirs,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        os.close(ours)
        os.close(theirs)
        assert (done.returncode, "Delete asked?" in done.stderr) == (code, True), done
    user.fails("describe", "asked", code=7, says="asked")


@pytest.mark.slow
def test_retained_queue_is_restored_with_its_messages(user: CommandLine) -> None:
    write(user, "q.yaml", QUEUE % ("kept", ""))
    user.ok("apply", "q.yaml")
    user.ok("send", "kept", "still here")
    output = user.ok("delete", "kept", "--yes", "--policy", "Retain")
    assert re.fullmatch(r"deleted kept; to restore it: postbus restore \d+\n", output)
    assert "kept" in {each["name"] for each in user.json("get", "deleted")}
    assert user.ok("restore", "kept").startswith("restored kept (")
    assert user.lines("receive", "kept")[0]["body"] == "still here"


# --- tables -------------------------------------------------------------------------------------


def test_tables_that_are_piped_have_a_line_for_each_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"name": "n" * 70, "at": "2026-11-21T19:11:10.457000Z", "text": "t" * 70}] * 2
    print_objects({"trouble": "t" * 200}, Format.TABLE)
    assert capsys.readouterr().out.split() == ["trouble", "t" * 200]
    print_objects(rows, Format.TABLE)
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "at", "text"]
    assert [line.split() for line in lines] == [["n" * 70, "2026-11-21T19:11:10Z", "t" * 70]] * 2


def test_names_are_whole_where_a_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=40, soft_wrap=True, emoji=False)
    monkeypatch.setattr("postbus.cli.formats.output.out", screen)
    row = {"sequenceNumber": 1, "messageId": "i" * 128, "sessionId": "s" * 30, "body": "b " * 40}
    print_objects([row], Format.WIDE)
    assert isinstance(screen.file, StringIO)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.file.getvalue())
    assert "i" * 128 in shown
    assert "s" * 30 in shown
    assert shown.count("b") >= 40


# --- everywhere ---------------------------------------------------------------------------------

COMMANDS = [
    ("apply", "q.yaml"), ("diff", "q.yaml"), ("export",), ("get", "queues"), ("describe", "x"),
    ("delete", "x", "--yes"), ("restore", "x"), ("status",), ("import", "Config.json", "--apply"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each[0])
def test_help_and_no_bus(tmp_path: Path, command: tuple[str, ...]) -> None:
    user = CommandLine(tmp_path)
    shown = user.ok(command[0], "--help")
    assert f"postbus {command[0]}" in shown
    assert "Exit codes" in shown
    write(user, "q.yaml", QUEUE % ("q", ""))
    queue = '{"UserConfig": {"Namespaces": [{"Queues": [{"Name": "q"}]}]}}'
    write(user, "Config.json", queue)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        says = "no bus answers at http://127.0.0.1:"
        user.fails(*command, code=7, says=says, POSTBUS_CONTROL_PORT=port)
