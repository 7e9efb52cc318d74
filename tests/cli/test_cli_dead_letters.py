"""`postbus peek`, `purge` and `dlq`, against a bus that `postbus dev` runs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine, folder_with_bus
from tests.dev_bus import LIMIT_S

NAMESPACE = """
apiVersion: postbus.dev/v1alpha1
kind: Namespace
metadata: {name: example-bus}
spec:
  authorizationRules:
    - {name: RootManageSharedAccessKey, rights: [Manage]}
"""
QUEUES = (
    "looked", "filtered", "purged", "locked", "resent", "target", "edited", "deleted", "paced",
    "refused", "table", "summed", "paged", "typed", "chosen", "back",
)  # fmt: skip


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Run a bus with a queue for each test until the module's tests are done."""
    manifest = NAMESPACE + "".join(
        f"---\napiVersion: postbus.dev/v1alpha1\nkind: Queue\nmetadata: {{name: {name}}}\n"
        "spec: {owner: {name: example-bus}}\n"
        for name in QUEUES
    )
    manifest += (
        "---\napiVersion: postbus.dev/v1alpha1\nkind: Topic\nmetadata: {name: news}\n"
        "spec: {owner: {name: example-bus}}\n"
    )
    path = tmp_path_factory.mktemp("bus") / "bus.yaml"
    path.write_text(manifest)
    with folder_with_bus(str(path)) as bus:
        yield bus


def send(user: CommandLine, queue: str, count: int) -> None:
    """Send messages with their number in body and property `n`."""
    lines = [
        json.dumps({"body": f"m{n}", "messageId": f"id-{n}", "applicationProperties": {"n": n}})
        for n in range(count)
    ]
    user.ok("send", queue, "--file", "-", stdin="\n".join(lines))


def kill(user: CommandLine, queue: str, count: int, reason: str = "bad") -> None:
    """Make dead letters."""
    send(user, queue, count)
    reject(user, queue, count, reason)


def reject(user: CommandLine, queue: str, count: int, reason: str = "bad") -> None:
    """Receive messages and dead-letter them."""
    arguments = ("--to-dead-letter", "--reason", reason, "--description", "why")
    assert len(user.lines("receive", queue, "--count", str(count), *arguments)) == count


def peeked(user: CommandLine, *arguments: str) -> list[str]:
    """Return the bodies that a peek shows."""
    done = user.ok("peek", *arguments, "-o", "json")
    return [json.loads(line)["body"] for line in done.splitlines()]


# --- peek ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_peek_shows_messages_without_changing_them(user: CommandLine) -> None:
    send(user, "looked", 300)
    assert peeked(user, "looked") == [f"m{n}" for n in range(20)]
    assert peeked(user, "looked", "--count", "0") == [f"m{n}" for n in range(300)]
    assert peeked(user, "looked", "--from", "299", "-n", "5") == ["m298", "m299"]
    user.ok("send", "looked", "later", "--schedule", "1h", "--id", "s", "--ttl", "2h")
    (line,) = user.ok("peek", "looked", "--state", "scheduled", "-o", "json").splitlines()
    entry = json.loads(line)
    assert (entry["body"], entry["state"], entry["timeToLive"]) == ("later", "scheduled", "PT2H")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["enqueuedTime"])
    assert user.lines("receive", "looked")[0]["deliveryCount"] == 1
    assert re.search(r"^ +2 .* id-1 .* m1 *$", user.ok("peek", "looked"), re.MULTILINE)
    assert "sequenceNumber: 2\n" in user.ok("peek", "looked", "-o", "yaml", "-n", "1")


@pytest.mark.slow
def test_filter_has_the_language_of_rules(user: CommandLine) -> None:
    send(user, "filtered", 1_100)  # the first thousand are a page that shows nothing
    where = ("--where", "n >= 1050 AND sys.MessageId <> 'id-1051'")
    assert peeked(user, "filtered", *where, "-n", "3") == ["m1050", "m1052", "m1053"]
    assert peeked(user, "filtered", "-w", "n = 2000") == []
    assert user.ok("peek", "filtered", "-w", "n = 2000") == "no messages\n"
    for command in (("peek",), ("purge", "-y"), ("dlq", "list"), ("dlq", "resend")):
        arguments = (*command, "filtered", "-w", "n > 2 AND n >> 2")
        error = user.fails(*arguments, code=4, says="--where: line 1, column 14: expected a value")
        shown = [line.removeprefix("postbus: ") for line in error.splitlines()[-2:]]
        assert shown == ["  n > 2 AND n >> 2", "               ^"]
    unknown = ("peek", "filtered", "-w", "sys.Nothing = 1")
    user.fails(*unknown, code=4, says="--where: there is no system property sys.Nothing")


@pytest.mark.slow
def test_peeked_messages_can_be_sent(user: CommandLine) -> None:
    kill(user, "table", 2)
    printed = user.ok("peek", "table", "--dead-letter", "-o", "json")
    entry = json.loads(printed.splitlines()[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["deadLetteredTime"])
    assert entry["deadLetteredTime"] > entry["enqueuedTime"]
    assert (entry["deadLetterDeliveries"], entry["deadLetterClient"]) == (1, "127.0.0.1")
    assert entry["deadLetterLink"]
    user.ok("send", "table", "--file", "-", stdin=printed)
    assert peeked(user, "table") == ["m0", "m1"]
    shown = user.ok("dlq", "list", "table", "--bodies")
    assert re.search(r"^ +1 .* id-0 +1 +bad +why *\nm0$", shown, re.MULTILINE)


# --- summary ------------------------------------------------------------------------------------


def die(user: CommandLine, queue: str, reason: str, *descriptions: str) -> None:
    for text in descriptions:
        user.ok("send", queue, f"of {text}")
        arguments = ("--to-dead-letter", "--reason", reason, "--description", text)
        assert len(user.lines("receive", queue, *arguments)) == 1


@pytest.mark.slow
def test_summary_shows_reasons_and_a_resend_command_for_each_group(
    user: CommandLine,
) -> None:
    die(user, "summed", "declined", "card 3 of ann's", "card 17 of ann's", "card 4 of ann's")
    die(user, "summed", "declined", "100% sure it's 1_fraud")
    die(user, "summed", "no stock", "none")
    groups = json.loads(user.ok("dlq", "summary", "summed", "-o", "json"))
    assert [(each["reason"], each["description"], each["count"]) for each in groups] == [
        ("declined", "card * of ann's", 3),
        ("declined", "* sure it's *", 1),
        ("no stock", "none", 1),
    ]
    assert groups[0]["first"] < groups[0]["last"]
    assert (groups[0]["exampleNumber"], groups[0]["exampleDescription"]) == (1, "card 3 of ann's")
    where = "DeadLetterReason = 'no stock' AND DeadLetterErrorDescription = 'none'"
    assert groups[2]["resend"] == f'postbus dlq resend summed --where "{where}"'
    table = user.ok("dlq", "summary", "summed", "-n", "2")
    assert re.search(r"^ +3 +declined +card \* of ann's ", table, re.MULTILINE)
    assert "5 dead letters in 3 groups\n" in table
    assert "showing the largest 2" in table
    for group in groups:
        command = shlex.split(group["resend"])
        assert command[:4] == ["postbus", "dlq", "resend", "summed"]
        assert group["resend"] in table or group is groups[2]
        output = user.ok(*command[1:], "--yes")
        assert f"resent {group['count']} of {group['count']} message" in output
    assert user.ok("dlq", "summary", "summed") == "no dead letters\n"
    narrow = user.ok("dlq", "summary", "summed", "-w", "DeadLetterReason = 'x'", "-o", "json")
    assert json.loads(narrow) == []
    user.fails("dlq", "summary", "nowhere", code=7, says="no queue or subscription")


@pytest.mark.slow
def test_tables_show_the_total_and_the_command_for_the_next_page(user: CommandLine) -> None:
    kill(user, "paged", 25)
    remark = user.run("dlq", "list", "paged").stderr
    assert remark == ("20 shown of 25 messages; continue with: postbus dlq list paged --from 21\n")
    assert user.run("dlq", "list", "paged", "--from", "21").stderr == ""
    assert user.run("dlq", "list", "paged", "-n", "25").stderr == ""
    remark = user.run("dlq", "list", "paged", "-n", "2", "--where", "n > 3").stderr
    assert "25 messages in total; continue with: postbus dlq list paged --where 'n > 3'" in remark


@pytest.mark.slow
def test_messages_are_found_by_body_and_wrong_names_are_reported(user: CommandLine) -> None:
    done = user.run("dlq", "list", "paged", "--where", "body LIKE '%m7%' AND n > 3")
    assert done.stdout == "no messages\n"
    assert "no message has a property body" in done.stderr
    assert "--body-contains" in done.stderr
    assert user.run("dlq", "list", "paged", "--where", "n = 1000").stderr == ""
    found = user.ok("dlq", "list", "paged", "--body-contains", "m1", "-o", "json")
    bodies = [json.loads(line)["body"] for line in found.splitlines()]
    assert bodies == ["m1", *(f"m{n}" for n in range(10, 20))]
    output = user.ok("dlq", "delete", "paged", "--body-contains", "m24", "--yes")
    assert output.endswith("deleted 1 of 1 message\n")
    both = ("--body-contains", "m2", "--where", "n > 20")
    assert user.ok("dlq", "resend", "paged", *both, "--dry-run") == "3 messages would be resent\n"
    output = user.ok("purge", "paged", "-d", "--body-contains", "m2", "--yes")
    assert output == "deleted 5 dead letters of paged\n"


# --- purge --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_purge_counts_confirms_and_deletes_selected_messages(user: CommandLine) -> None:
    send(user, "purged", 300)
    output = user.ok("purge", "purged", "--where", "n < 100", "--dry-run")
    assert output == "100 messages of purged would be deleted\n"
    user.fails(
        "purge", "purged", code=2, says="cannot ask for confirmation without a terminal: add --yes"
    )
    assert len(peeked(user, "purged", "-n", "0")) == 300
    output = user.ok("purge", "purged", "--where", "n < 100", "--yes")
    assert output == "deleted 100 messages of purged\n"
    assert peeked(user, "purged", "-n", "1") == ["m100"]
    assert user.ok("purge", "purged", "-y") == "deleted 200 messages of purged\n"
    assert user.ok("purge", "purged", "-y") == "deleted 0 messages of purged\n"
    assert user.ok("purge", "purged") == "no messages\n"


@pytest.mark.slow
def test_purge_skips_and_names_a_locked_message(user: CommandLine) -> None:
    send(user, "locked", 2)
    holding = subprocess.Popen(
        [sys.executable, "-m", "postbus", "receive", "locked", "--peek-lock", "100"],
        cwd=user.folder, env=user.environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holding.stdout is not None
    assert b"m0" in holding.stdout.readline()
    done = user.run("purge", "locked", "--yes")
    assert (done.returncode, done.stdout) == (1, "deleted 1 message of locked\n")
    assert re.match(r"1: .*lock", done.stderr)
    holding.send_signal(signal.SIGINT)
    holding.communicate(timeout=LIMIT_S)
    assert user.lines("receive", "locked")[0]["body"] == "m0"


# --- dead letters -------------------------------------------------------------------------------


@pytest.mark.slow
def test_dead_letters_are_listed_and_resent(user: CommandLine) -> None:
    kill(user, "resent", 5)
    letters = user.ok("dlq", "list", "resent", "-o", "json").splitlines()
    listed = json.loads(letters[0])
    assert (listed["deadLetterReason"], listed["deadLetterDescription"]) == ("bad", "why")
    assert user.ok("dlq", "resend", "resent", "1", "3", "1") == "resent 2 of 2 messages\n"
    assert peeked(user, "resent") == ["m0", "m2"]
    assert peeked(user, "resent/$DeadLetterQueue") == ["m1", "m3", "m4"]
    done = user.run("dlq", "resend", "resent", "1")
    assert (done.returncode, done.stdout) == (
        1, "resent 0 of 1 message; no longer there: 1 (1)\n",
    )  # fmt: skip
    output = user.ok("dlq", "resend", "resent", "--where", "n = 3", "--dry-run")
    assert output == "1 message would be resent\n"
    user.ok("dlq", "resend", "resent", "--where", "n = 3", "--to", "target", "--yes")
    user.ok("dlq", "resend", "resent", "--all", "--yes")
    assert peeked(user, "resent") == ["m0", "m2", "m1", "m4"]
    (copy,) = user.lines("receive", "target", "--wait", "20")
    assert (copy["body"], copy["messageId"]) == ("m3", "id-3")
    assert copy["applicationProperties"] == {"n": 3}
    assert user.ok("dlq", "resend", "resent", "--all", "-y") == "no messages\n"


@pytest.mark.slow
def test_numbers_of_a_file_are_resent_and_deleted(user: CommandLine, tmp_path: Path) -> None:
    """The list of a program, such as Spark; a repeated run goes on where the first one ended."""
    kill(user, "chosen", 6)
    file = tmp_path / "chosen.txt"
    file.write_text("4\n\n2\r\n4\n99\n")
    chosen = ("chosen", "--numbers-file", str(file))
    assert user.ok("dlq", "resend", *chosen, "--dry-run") == "3 messages would be resent\n"
    output = user.ok("dlq", "resend", *chosen, "--yes")
    assert output == "resent 2 of 3 messages; no longer there: 1 (99)\n"
    assert peeked(user, "chosen") == ["m3", "m1"]
    assert user.ok("dlq", "resend", *chosen, "-y").startswith("resent 0 of 3 messages")
    done = user.run("dlq", "delete", "chosen", "--numbers-file", "-", "-y", stdin="1\n3\n")
    assert (done.returncode, done.stdout) == (0, "deleted 2 of 2 messages\n")
    assert peeked(user, "chosen/$DeadLetterQueue") == ["m4", "m5"]
    file.write_text("")
    assert user.ok("dlq", "resend", *chosen, "-y") == "no messages\n"
    given = ("dlq", "resend", "chosen", "--numbers-file", "-")
    user.fails(*given, stdin="1\n", code=2, says="add --yes")


@pytest.mark.slow
def test_messages_that_came_back_too_often_stay_dead_letters(user: CommandLine) -> None:
    send(user, "back", 1)
    resend = ("dlq", "resend", "back", "--all", "--yes", "--max-resends")
    for _ in range(2):
        reject(user, "back", 1)
        assert user.ok(*resend, "2") == "resent 1 of 1 message\n"
    reject(user, "back", 1)
    user.fails(*resend, "2", code=1, says="it was resent 2 times, and came back")
    [letter] = map(json.loads, user.ok("dlq", "list", "back", "-o", "json").splitlines())
    assert letter["resends"] == 2
    assert user.ok(*resend, "0") == "resent 1 of 1 message\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"1\n-2\n", "line 2: no sequence number"),
        (b"sequence_number\n1\n", "line 1: no sequence number"),
        (b"9223372036854775808\n", "line 1: no sequence number"),
        (b"1" * 5_000, "line 1: no sequence number"),
        ("\u0661\n".encode(), "has no text"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_without_numbers_is_named(
    user: CommandLine, tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "chosen.txt"
    if content is not None:
        file.write_bytes(content)
    user.fails("dlq", "resend", "resent", "--numbers-file", str(file), "-y", code=4, says=says)


@pytest.mark.slow
def test_dead_letter_is_edited_and_resent(user: CommandLine) -> None:
    kill(user, "edited", 2)
    user.ok(
        "dlq", "edit", "edited", "1", "--body", "fixed", "-p", "amount:int=7", "-p", "who=me",
        "--subject", "repaired", "--id", "", "--remove-property", "n",
    )  # fmt: skip
    (copy,) = user.lines("receive", "edited")
    assert copy.get("messageId") != "id-0"
    assert (copy["body"], copy["subject"]) == ("fixed", "repaired")
    assert copy["applicationProperties"] == {"amount": 7, "who": "me"}
    user.ok("dlq", "edit", "edited", "2", "--body-file", "-", stdin=b"\xff")
    assert user.lines("receive", "edited")[0]["bodyBase64"] == "/w=="
    user.fails("dlq", "edit", "edited", "2", code=2, says="nothing to change")


@pytest.mark.slow
def test_the_body_of_a_dead_letter_is_changed_in_an_editor(user: CommandLine) -> None:
    kill(user, "typed", 2)
    edit = ("dlq", "edit", "typed", "1", "--editor")
    user.fails(*edit, code=4, says="the body was not changed", EDITOR="true")
    user.fails(*edit, code=1, says="exited with 1: nothing was sent", EDITOR="false")
    user.fails(*edit, code=4, says="set EDITOR", EDITOR="/no/such/editor")
    gone = ("dlq", "edit", "typed", "9", "--editor")
    user.fails(*gone, code=7, says="9: no such dead letter in typed", EDITOR="true")
    both = (*edit, "--body", "x")
    user.fails(*both, code=2, says="use only one of --body, --body-file and --editor")
    assert user.ok(*edit, EDITOR="sed -i s/m0/typed/") == "resent 1 of 1 message\n"
    assert user.lines("receive", "typed")[0]["body"] == "typed"


@pytest.mark.slow
def test_dead_letters_are_deleted(user: CommandLine) -> None:
    kill(user, "deleted", 4)
    assert user.ok("dlq", "delete", "deleted", "2") == "deleted 1 of 1 message\n"
    output = user.ok("dlq", "delete", "deleted", "--where", "n > 1", "-y")
    assert output == "deleted 2 of 2 messages\n"
    assert user.ok("purge", "deleted", "--dead-letter", "-y") == (
        "deleted 1 dead letter of deleted\n"
    )


@pytest.mark.slow
def test_interrupted_resend_continues_and_sends_each_message_once(user: CommandLine) -> None:
    kill(user, "paced", 120)
    resending = subprocess.Popen(
        [sys.executable, "-m", "postbus", "dlq", "resend", "paced", "--all", "-y", "--rate", "40"],
        cwd=user.folder, env=user.environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    wait_for_some(user, "paced")
    resending.send_signal(signal.SIGINT)
    _, error = resending.communicate(timeout=LIMIT_S)
    found = re.match(
        r"resent (\d+) of 120 messages; run the command again to continue", error.decode()
    )
    assert (found is not None, resending.returncode) == (True, 130), error
    assert 0 < len(peeked(user, "paced", "-n", "0")) < 120
    user.ok("dlq", "resend", "paced", "--all", "-y", "--rate", "1000")
    bodies = peeked(user, "paced", "-n", "0")
    assert sorted(bodies) == sorted(f"m{n}" for n in range(120))


def wait_for_some(user: CommandLine, queue: str) -> None:
    while not peeked(user, queue):
        pass


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bad_input(user: CommandLine) -> None:
    for command in ("resend", "delete"):
        user.fails("dlq", command, "refused", code=2, says="--body-contains, or with --all")
        user.fails(
            "dlq", command, "refused", "1", "--all", code=2, says="select messages by number"
        )
        user.fails("dlq", command, "refused", "x", code=2, says="should be a valid integer")
        user.fails("dlq", command, "nobody", "1", code=7, says="no queue or subscription nobody")
    for command in (("peek",), ("purge", "-y"), ("dlq", "list")):
        user.fails(*command, "nobody", code=7, says="subscription nobody")
    kill(user, "refused", 1)
    missing = "no queue or topic nowhere: nothing was sent"
    user.fails("dlq", "resend", "refused", "1", "--to", "nowhere", code=7, says=missing)
    edit = ("dlq", "edit", "refused", "1", "--body", "x", "--to", "nowhere")
    user.fails(*edit, code=7, says=missing)
    user.fails(
        "dlq", "edit", "refused", "1", "-p", "at:timestamp=2030-01-01T00:00:00Z",
        code=4, says="at: use text, a number or a boolean",
    )  # fmt: skip
    assert peeked(user, "refused", "--dead-letter") == ["m0"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [("peek",), ("dlq", "list")], ids=lambda each: each[-1])
def test_commands_on_a_topic_name_its_subscriptions(
    user: CommandLine, command: tuple[str, ...]
) -> None:
    done = user.run(*command, "news")
    assert (done.returncode, done.stdout) == (0, "no messages\n")
    assert "news is a topic" in done.stderr
    assert "is a topic" not in user.run(*command, "looked").stderr


COMMANDS = [
    ("peek", "x"), ("purge", "x", "-y"), ("dlq", "list", "x"), ("dlq", "resend", "x", "1"),
    ("dlq", "delete", "x", "1"), ("dlq", "edit", "x", "1", "--body", "y"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: "-".join(each[:2]))
def test_help_and_no_bus(tmp_path: Path, command: tuple[str, ...]) -> None:
    user = CommandLine(tmp_path)
    words = command[:2] if command[0] == "dlq" else command[:1]
    shown = user.ok(*words, "--help")
    assert f"postbus {' '.join(words)}" in shown
    assert "Exit codes" in shown
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        says = "no bus answers at http://127.0.0.1:"
        user.fails(*command, code=7, says=says, POSTBUS_CONTROL_PORT=port)
