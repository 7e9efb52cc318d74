"""Commands and programs of README and guides work: every snippet is run or checked.

Snippets of one page run in order and share their variables, as a reader's would. Each is in a
fence that names its language; a fence that no test here understands fails.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer.main
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusSubQueue,
)

from postbus.broker.access import authorization_rules
from postbus.broker.placement import NUMBER_BITS
from postbus.cli import app
from postbus.contract.durations import MAX_DURATION_MS, parse_duration_ms
from postbus.contract.entities import LIMITS, NamespaceLimits, QueueProperties, Sku, SqlFilter
from postbus.contract.resources import MAX_RULES, QueueSpec
from postbus.edge.amqp import transactions
from postbus.edge.amqp.session_links import NEXT_SESSION_S
from postbus.edge.atom import errors as atom_errors
from postbus.edge.atom import handler as atom_handler
from postbus.edge.atom import xml_text as atom_xml
from postbus.edge.runtime import receives as http_runtime_receives
from postbus.edge.runtime import requests as http_runtime_requests
from postbus.edge.web import authorization as http_authorization
from postbus.entity.queues import dedup
from postbus.entity.queues.dead_letter_reasons import DESCRIPTION, EXPIRED, HEADER_TOO_LARGE, REASON
from postbus.entity.topics import topic_state
from postbus.entity.topics.publish_limits import PublishLimits
from postbus.entity.transfer import outbox
from postbus.entity.transfer.inbox import MAX_FORWARD_HOPS
from postbus.manifests.reader import read_one_bus
from postbus.process.settings import Settings
from postbus.rules import actions as sql_actions
from postbus.rules import expressions as sql_expressions
from postbus.rules import grammar as sql_grammar
from postbus.rules.values import EvaluationError
from postbus_operator.settings import PREFIX as OPERATOR_PREFIX
from postbus_operator.settings import Settings as OperatorSettings
from tests.dev_bus import LIMIT_S, ROOT, DevBus, environment, running_dev_bus

GUIDES = ROOT / "docs" / "guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
STARTED, DEAD = GUIDES / "getting-started.md", GUIDES / "dead-letters.md"
TIME = GUIDES / "testing-with-time.md"
MESSAGING, TOPICS = GUIDES / "messaging.md", GUIDES / "topics-and-rules.md"
JAVA = ROOT / "tests" / "sdk" / "java" / "src" / "test" / "java" / "dev" / "postbus"
HTTP, ADMINISTRATION = GUIDES / "http.md", GUIDES / "administration.md"
BULK, SPARK = GUIDES / "bulk.md", GUIDES / "spark.md"
UNREAD = {
    GUIDES / "backup.md",
    GUIDES / "connections.md",
    GUIDES / "control-api.md",
    GUIDES / "from-the-emulator.md",
    GUIDES / "gitops.md",
    GUIDES / "images.md",
    GUIDES / "kubernetes-buses.md",
    GUIDES / "kubernetes-integrations.md",
    GUIDES / "kubernetes-keys.md",
    GUIDES / "kubernetes-operations.md",
    GUIDES / "kubernetes.md",
    GUIDES / "lake.md",
    GUIDES / "operations.md",
    GUIDES / "pipelines.md",
}
"""Tests of their own try them: data directories are copied, a cluster is needed."""

WAIT_S = 0.5
LANGUAGES = {"sh", "python", "toml", "yaml", "console", "java"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DEAD_LETTERS = ServiceBusSubQueue.DEAD_LETTER


class Snippet(NamedTuple):
    page: Path
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.stem}-{self.number}-{self.language}"


def snippets(*languages: str) -> list[Snippet]:
    return [
        Snippet(page, number, found[1], found[2])
        for page in PAGES
        if page not in UNREAD
        for number, found in enumerate(FENCE.finditer(page.read_text(encoding="utf-8")), 1)
        if not languages or found[1] in languages
    ]


def one_snippet(page: Path, language: str) -> Snippet:
    (found,) = (each for each in snippets(language) if each.page == page)
    return found


# --- a bus as the guides start it ---------------------------------------------------------------


@pytest.fixture(scope="module")
def dev_bus() -> Iterator[DevBus]:
    """Run `postbus dev examples` until the module's tests are done."""
    with running_dev_bus("examples") as bus:
        yield bus


def run_python(
    snippet: Snippet, bus: DevBus, variables: dict[str, Any], *, is_patient: bool = False
) -> None:
    """Run a snippet as written, only with the port of this bus and usually less patience."""
    endpoint = bus.connection_string.partition(";")[0] + ";"
    text = snippet.text.replace("Endpoint=sb://localhost;", endpoint)
    if not is_patient:
        text = re.sub(r"max_wait_time=\d", f"max_wait_time={WAIT_S}", text)
    exec(compile(text, str(snippet), "exec"), variables)


def run_page(page: Path, bus: DevBus, *, is_patient: bool = False) -> None:
    variables: dict[str, Any] = {"connection_string": bus.connection_string}
    for snippet in snippets("python"):
        if snippet.page == page:
            run_python(snippet, bus, variables, is_patient=is_patient)


def definitions_of(page: Path) -> dict[str, Any]:
    """Return the names that a page's snippets define, without running their statements."""
    kept = (ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef)
    names: dict[str, Any] = {}
    for snippet in snippets("python"):
        if snippet.page == page:
            tree = ast.parse(snippet.text)
            tree.body = [node for node in tree.body if isinstance(node, kept)]
            exec(compile(tree, str(snippet), "exec"), names)
    return names


def bodies(bus: DevBus, queue: str = "orders", **options: Any) -> list[str]:
    """Receive and complete all messages; return their bodies."""
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_receiver(queue, max_wait_time=WAIT_S, **options) as receiver,
    ):
        found = []
        for message in receiver:
            receiver.complete_message(message)
            found.append(str(message))
        return found


# --- Python -------------------------------------------------------------------------------------


def test_pages_have_snippets_and_every_fence_names_a_language_that_is_tested() -> None:
    assert len(snippets()) >= 10
    assert {snippet.language for snippet in snippets()} <= LANGUAGES
    tested = {ROOT / "README.md", STARTED, DEAD, TIME, MESSAGING, TOPICS, ADMINISTRATION, SPARK}
    assert {snippet.page for snippet in snippets("python", "yaml", "console", "java")} <= tested


@pytest.mark.slow
@pytest.mark.parametrize("manifests", [["examples"], []], ids=["make dev", "postbus dev"])
def test_readme_sends_to_the_bus_of_either_way(manifests: list[str]) -> None:
    with running_dev_bus(*manifests) as bus:
        run_page(ROOT / "README.md", bus)
        assert bodies(bus, "queue.1") == ["hello"]


@pytest.mark.slow
def test_getting_started_sends_and_receives(
    dev_bus: DevBus, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(STARTED, dev_bus)
    assert capsys.readouterr().out == "hello\n"
    assert count_of(dev_bus, "active") == 0


@pytest.mark.slow
def test_example_program_sends_and_receives(dev_bus: DevBus) -> None:
    program = ROOT / "examples" / "send_receive.py"
    done = subprocess.run(
        [sys.executable, program, dev_bus.connection_string],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    first, *received = done.stdout.splitlines()
    assert first == "sent 3 messages"
    assert [line.split(" as ")[0] for line in received] == [f"received order {n}" for n in range(3)]


# --- dead letters -------------------------------------------------------------------------------


def make_dead_letters(bus: DevBus) -> None:
    """Two that failed five times, one that expired, one of the application, one without reason."""
    with ServiceBusClient.from_connection_string(bus.connection_string) as client:
        with client.get_queue_sender("orders") as sender:
            sender.send_messages(
                [
                    ServiceBusMessage("late", time_to_live=timedelta(milliseconds=1)),
                    *(
                        ServiceBusMessage(body, message_id=f"id-{body}", subject="s")
                        for body in ("unwanted", "unexplained")
                    ),
                    *(
                        ServiceBusMessage(
                            body,
                            message_id=f"id-{body}",
                            application_properties={"number": 7, "word": "wörd"},
                            content_type="text/plain",
                            correlation_id="together",
                            reply_to="answers",
                            time_to_live=timedelta(days=1),
                            to="somewhere",
                        )
                        for body in ("poison 1", "poison 2")
                    ),
                ]
            )
        with client.get_queue_receiver("orders", max_wait_time=WAIT_S) as receiver:
            for message in receiver:
                if str(message) == "unwanted":
                    receiver.dead_letter_message(message, reason="no-address")
                elif str(message) == "unexplained":
                    receiver.dead_letter_message(message)
                else:
                    receiver.abandon_message(message)


def reasons_of_the_guide(chapter: str = "Why") -> dict[str, str]:
    """Return reason -> cell of the description as the guide's table has them."""
    text = DEAD.read_text(encoding="utf-8").partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE)
    return {reason: description.strip("`") for reason, description in rows}


@pytest.mark.slow
@pytest.mark.behaviour("S255", "S256", "S257", "S261", "S265", "S297")
def test_dead_letters_are_seen_resent_and_thrown_away(
    dev_bus: DevBus, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dead_letters(dev_bus)
    look, resend, purge = (each for each in snippets("python") if each.page == DEAD)
    variables: dict[str, Any] = {"connection_string": dev_bus.connection_string}

    run_python(look, dev_bus, variables)
    seen = capsys.readouterr().out.splitlines()
    table = reasons_of_the_guide()
    (late,) = (line for line in seen if "TTLExpiredException" in line)
    assert late.endswith(f"TTLExpiredException {table['TTLExpiredException']}")
    poisoned = [line for line in seen if "MaxDeliveryCountExceeded" in line]
    text = table["MaxDeliveryCountExceeded"].replace("10", "5")  # as in examples/queues.yaml
    assert [line.endswith(f" 5 MaxDeliveryCountExceeded {text}") for line in poisoned] == [True] * 2
    assert [line.split()[1] for line in seen if "None" in line] == ["id-unwanted", "id-unexplained"]
    assert len(seen) == 5

    run_python(resend, dev_bus, variables)
    assert capsys.readouterr().out == "2 sent again\n"
    with (
        ServiceBusClient.from_connection_string(dev_bus.connection_string) as client,
        client.get_queue_receiver("orders", max_wait_time=WAIT_S) as receiver,
    ):
        resent = [expect_whole_copy(message, receiver) for message in receiver]
    assert resent == ["poison 1", "poison 2"]

    assert count_of(dev_bus, "dead_letter") == 3
    run_python(purge, dev_bus, variables)
    assert capsys.readouterr().out == "3 thrown away\n"
    assert (count_of(dev_bus, "dead_letter"), count_of(dev_bus, "active")) == (0, 0)


def expect_whole_copy(message: ServiceBusReceivedMessage, receiver: Any) -> str:
    """Check the properties of a resent message, and complete it."""
    assert message.delivery_count == 0
    assert message.application_properties == {b"number": 7, b"word": "wörd".encode()}
    assert message.dead_letter_reason is None
    assert message.message_id == f"id-{message}"
    assert message.content_type == "text/plain"
    assert message.correlation_id == "together"
    assert message.reply_to == "answers"
    assert message.subject is None
    assert message.time_to_live == timedelta(days=1)
    assert message.to == "somewhere"
    receiver.complete_message(message)
    return str(message)


@pytest.mark.slow
def test_resending_ends_although_the_copies_die_again(dev_bus: DevBus) -> None:
    """A consumer dead-letters each copy before the next dead letter is read."""
    resend = definitions_of(DEAD)["resend"]
    sent: list[ServiceBusMessage] = []
    client = ServiceBusClient.from_connection_string(dev_bus.connection_string)
    with (
        client,
        client.get_queue_sender("orders") as sender,
        client.get_queue_receiver("orders") as receiver,
    ):

        def send_and_fail(message: ServiceBusMessage) -> None:
            sent.append(message)
            assert len(sent) <= 2, "it goes round in circles"
            sender.send_messages(message)
            (copy,) = receiver.receive_messages(1, max_wait_time=LIMIT_S)
            receiver.dead_letter_message(copy, reason="bad")

        send_and_fail(ServiceBusMessage("poison"))
        failing = SimpleNamespace(send_messages=send_and_fail)
        friends = SimpleNamespace(
            get_queue_receiver=client.get_queue_receiver,
            get_queue_sender=lambda queue: nullcontext(failing),
        )
        assert resend(friends, "orders", "bad") == 1
    assert bodies(dev_bus, sub_queue=DEAD_LETTERS) == ["poison"]


def test_reasons_of_the_guide_are_those_of_the_bus() -> None:
    table = reasons_of_the_guide()
    for properties in (EXPIRED, HEADER_TOO_LARGE, topic_state.NO_SESSION):
        assert table.pop(str(properties[REASON])) == properties[DESCRIPTION]
    assert table.pop("MaxDeliveryCountExceeded")  # compared with the output of a bus
    assert set(table) == {EvaluationError("").name, sql_actions.ACTION_ERROR}


def test_transfer_reasons_of_the_guide_are_those_of_the_bus() -> None:
    table = reasons_of_the_guide("Transfer dead letters")
    written = {texts for texts in outbox._TRANSFER_REASONS.values() if texts is not None}
    assert set(table) == {reason for reason, _ in written}
    for reason, description in written - {("TransferFailed", None)}:
        if description is None:
            assert table[reason] == "none"
        else:
            assert description.partition("disabled for ")[0] in table[reason]


# --- HTTP -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_http_answers_are_those_of_the_guide(dev_bus: DevBus, tmp_path: Path) -> None:
    assert lines_of_shell(HTTP, dev_bus, tmp_path) == ["three boxes", "404", "second", "third"]
    assert count_of(dev_bus, "active") == 0


def lines_of_shell(page: Path, bus: DevBus, folder: Path) -> list[str]:
    """Run a page's commands in one shell, with the ports and the program of this checkout."""
    port = bus.http.rpartition(":")[2]
    script = "".join(each.text for each in snippets("sh") if each.page == page)
    program = f"{shlex.quote(sys.executable)} -m postbus"
    script = re.sub(r"(^|\$\()postbus ", rf"\1{program} ", script, flags=re.MULTILINE)
    script = script.replace(":5300", f":{port}").replace("python3 ", f"{sys.executable} ")
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", script],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=folder,
        env=environment(POSTBUS_CONNECTION_STRING=bus.connection_string),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
def test_administration_works_as_the_guide_shows(
    dev_bus: DevBus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = re.search(r"SharedAccessKey=([^;]+)", dev_bus.connection_string)
    assert key is not None
    variables: dict[str, Any] = {}
    for snippet in snippets("python"):
        if snippet.page == ADMINISTRATION:
            text = snippet.text.replace("localhost:5300", dev_bus.http.removeprefix("http://"))
            text = text.replace("SAS_KEY_VALUE", key[1]).replace("ca.pem", dev_bus.authority_file)
            exec(compile(text, str(snippet), "exec"), variables)
    administration = variables["administration"]
    assert capsys.readouterr().out.splitlines() == ["Standard", "0 0", "['by-amount', 'vip']"]
    assert administration.get_queue("returns").max_delivery_count == 5
    administration.delete_topic("shop/events")
    administration.delete_queue("returns")
    administration.close()
    assert lines_of_shell(ADMINISTRATION, dev_bus, tmp_path) == [
        "201",
        "<MessageCount>0</MessageCount>",
    ]


def test_statuses_of_administration_are_those_of_the_bus() -> None:
    text = ADMINISTRATION.read_text(encoding="utf-8").partition("## When it fails")[2]
    rows = re.findall(r"^\| (\d{3}) \| (\d*) ?\|", text, re.MULTILINE)
    known = {(status, sub_code) for status, sub_code, _ in atom_errors.REFUSALS.values()}
    for name in ("NO_RIGHT", "NO_TOKEN", "BAD_TOKEN"):
        code = getattr(http_authorization, name).removeprefix("SubCode=").removesuffix(".")
        known.add((401, int(code)))
    assert {(int(status), int(code)) for status, code in rows if code} == known
    assert [int(status) for status, code in rows if not code] == [405, 413]
    page = words(ADMINISTRATION)
    assert f"$top (at most {atom_handler.MAX_TOP})" in page
    assert f"A body has at most {atom_xml.MAX_BODY_BYTES >> 20} MiB" in page
    assert f"at most {authorization_rules.MAX_RULES}" in page


def test_statuses_of_the_guide_are_those_of_the_bus() -> None:
    text = HTTP.read_text(encoding="utf-8").partition("## When it fails")[2]
    statuses = {int(status) for status in re.findall(r"^\| (\d{3}) \|", text, re.MULTILINE)}
    assert statuses == {*http_runtime_requests.STATUSES.values(), 401, 405, 429} - {409}
    page = words(HTTP)
    assert f"{http_runtime_receives.MAX_RECEIVES:,} receives may wait" in page
    assert f"({http_runtime_requests.DEFAULT_TIMEOUT_S:.0f} when absent" in page


# --- messaging ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.behaviour("S166", "S169", "S229")
def test_messaging_works_as_the_guide_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_dev_bus(manifest_of(MESSAGING, tmp_path)) as bus:
        run_page(MESSAGING, bus, is_patient=True)
    assert capsys.readouterr().out.splitlines() == [
        "order 7 was None",
        "order 7 is b'paid'",
        "pay 5 payment-17",
        "order without address from all-orders because no-address",
        "1 partition",
    ]


@pytest.mark.slow
def test_subscriptions_get_the_copies_of_the_guide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_dev_bus(manifest_of(TOPICS, tmp_path)) as bus:
        run_page(TOPICS, bus, is_patient=True)
    assert capsys.readouterr().out.splitlines() == [
        "archive order 1 None",
        "archive order 2 None",
        "large-orders order 2 b'high'",
        "europe order 1 None",
    ]


def test_java_of_the_pages_is_part_of_the_tests_of_the_java_sdk() -> None:
    clients = FENCE.findall((ROOT / "docs" / "clients.md").read_text(encoding="utf-8"))
    texts = [text for language, text in clients if language == "java"]
    assert len(texts) == 2
    programs = [" ".join(path.read_text(encoding="utf-8").split()) for path in JAVA.glob("*.java")]
    for text in [*texts, *(snippet.text for snippet in snippets("java"))]:
        assert any(" ".join(text.split()) in program for program in programs), text


def words(page: Path) -> str:
    """Return a page as one line without marks."""
    return " ".join(re.sub(r"[*`|]", " ", page.read_text(encoding="utf-8")).split())


def limit_rows() -> dict[str, list[str]]:
    """Return the first cell of each row of the table of limits -> the others."""
    text = MESSAGING.read_text(encoding="utf-8").partition("\n## Limits\n")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in rows}


def test_limits_of_the_guides_are_those_of_the_bus() -> None:
    rows = limit_rows()
    for at, limits in enumerate((LIMITS[Sku.STANDARD], LIMITS[Sku.PREMIUM])):
        expected = limits_of_bus(limits)
        assert {name: rows[name][at] for name in expected} == expected
    assert rows["partitions of the bus"][0] == str(LIMITS[Sku.STANDARD].partition_count)
    assert rows["partitioned entities"][0] == str(LIMITS[Sku.STANDARD].max_partitioned_count)
    for retention in ("PT1M", "P90D"):
        QueueProperties.model_validate({"historyRetention": retention})
    assert rows["retention of a history"] == ["1 minute to 90 days"] * 2
    text = words(MESSAGING)
    assert f"lasts {NEXT_SESSION_S:.0f} s unless" in text
    assert transactions.LIFETIME_S == 120
    assert "open for at most two minutes" in text
    assert NUMBER_BITS == 48
    assert "upper 16 bits of a sequence number" in text
    text = words(TOPICS)
    longest = next(each.max_length for each in SqlFilter.model_fields["sql_expression"].metadata)
    assert longest == sql_grammar.MAX_CHARS
    publish = PublishLimits()
    for sentence in (
        f"{sql_grammar.MAX_CHARS:,} characters for each text",
        f"{sql_grammar.MAX_COMPARISONS} conditions in a filter",
        f"{sql_grammar.MAX_STATEMENTS} statements in an action",
        f"{sql_grammar.MAX_DEPTH} levels of nesting",
        f"at most {MAX_RULES} in a manifest",
        f"{publish.max_copies:,} copies and {publish.max_row_bytes >> 20} MiB",
    ):
        assert sentence in text, sentence


def limits_of_bus(limits: NamespaceLimits) -> dict[str, str]:
    state = limits.max_session_state_bytes >> 10
    publish = PublishLimits()
    return {
        "queues and topics of a namespace": f"{limits.max_entity_count:,}",
        "subscriptions of a topic": f"{limits.max_subscription_count:,}",
        "rules of a topic: SQL, correlation": (
            f"{limits.max_sql_rule_count:,}, {limits.max_correlation_rule_count:,}"
        ),
        "copies of one publish": (f"{publish.max_copies:,}, {publish.max_row_bytes >> 20} MiB"),
        "session state": f"{state} KB" if state < 1024 else f"{state >> 10} MB",
        "session id, message id, partition key": f"{limits.max_id_chars} characters",
        "messages and bytes of a transaction": (
            f"{transactions.MAX_MESSAGES}, {transactions.MAX_BYTES >> 20} MiB"
        ),
        "open transactions of a connection": f"{transactions.MAX_OPEN:,}",
        "ids in a duplicate detection window, for each partition": f"{dedup.MAX_IDS >> 20} Mi",
        "forwarding hops": str(MAX_FORWARD_HOPS),
    }


def test_fields_of_the_guide_are_those_of_sql() -> None:
    text = " ".join(TOPICS.read_text(encoding="utf-8").split())
    fields = re.search(r"Fields are `sys.` with (.*?)\. Fields that", text)
    settable = re.search(r"Of the fields these can be set: (.*?)\. An unknown", text)
    assert fields is not None
    assert settable is not None
    known = sql_expressions.SYSTEM_NAMES - set(sql_expressions._NOT_YET)
    assert {name.lower() for name in re.findall(r"`(\w+)`", fields[1])} == known
    named = {name.lower() for name in re.findall(r"`(\w+)`", settable[1])}
    assert named - {"pt1h"} == set(sql_actions.SETTABLE)


# --- YAML and the output of `postbus check` -----------------------------------------------------


def write_manifest(folder: Path, snippet: Snippet) -> Path:
    path = folder / "my-bus.yaml"
    path.write_text(snippet.text, encoding="utf-8")
    return path


def manifest_of(page: Path, folder: Path) -> Path:
    """Write the one bus that all the manifests of a page describe."""
    path = folder / "my-bus.yaml"
    parts = [snippet.text for snippet in snippets("yaml") if snippet.page == page]
    path.write_text("---\n".join(parts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "page", sorted({snippet.page for snippet in snippets("yaml")}), ids=lambda page: page.stem
)
def test_manifests_are_valid(page: Path, tmp_path: Path) -> None:
    bus = read_one_bus([manifest_of(page, tmp_path)])
    assert bus.queues or bus.subscriptions


def expect_shown(snippet: Snippet, folder: Path) -> None:
    """Run a command in a folder and compare its output with the guide."""
    command, _, output = snippet.text.removeprefix("$ ").partition("\n")
    name, *arguments = shlex.split(command)
    assert name == "postbus"
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=folder,
        env=environment(),
    )
    assert done.stdout == output


@pytest.mark.slow
def test_check_prints_the_output_of_the_guide(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, one_snippet(STARTED, "yaml"))
    mistake = re.search(r"such as `(lockDuration: \w+)`", STARTED.read_text(encoding="utf-8"))
    assert mistake is not None
    right, wrong = (snippet for snippet in snippets("console") if snippet.page == STARTED)
    expect_shown(right, tmp_path)
    text = re.sub(r"lockDuration: \w+", mistake[1], manifest.read_text(encoding="utf-8"))
    manifest.write_text(text, encoding="utf-8")
    expect_shown(wrong, tmp_path)


@pytest.mark.slow
def test_check_finds_the_mistake_of_the_guide_in_a_rule(tmp_path: Path) -> None:
    manifest = write_manifest(
        tmp_path, next(each for each in snippets("yaml") if each.page == TOPICS)
    )
    mistake = re.search(r"With `(.+?)` in the manifest", TOPICS.read_text(encoding="utf-8"))
    assert mistake is not None
    text = manifest.read_text(encoding="utf-8").replace("amount > 1000", mistake[1])
    manifest.write_text(text, encoding="utf-8")
    expect_shown(one_snippet(TOPICS, "console"), tmp_path)


UNMENTIONED = {
    "enableBatchedOperations", "enableExpress", "operatorSpec",
}  # fmt: skip
"""Fields of a queue that change nothing."""


def test_table_of_queue_fields_is_whole_and_has_the_defaults() -> None:
    text = STARTED.read_text(encoding="utf-8").partition("\nFields of a queue:\n")[2]
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE))
    defaults = {
        field.alias or name: field.default for name, field in QueueSpec.model_fields.items()
    }
    assert {name.partition(".")[0] for name in rows} == set(defaults) - UNMENTIONED
    assert rows["status"] == f"`{defaults['status'].value}`"
    assert parse_duration_ms(rows["lockDuration"].strip("`")) == defaults["lockDuration"]
    assert rows["defaultMessageTimeToLive"].startswith("no limit")
    assert defaults["defaultMessageTimeToLive"] == MAX_DURATION_MS
    assert rows["deadLetteringOnMessageExpiration"] == "false"
    assert defaults["deadLetteringOnMessageExpiration"] is False
    for name in ("maxDeliveryCount", "maxSizeInMegabytes", "maxMessageSizeInKilobytes"):
        assert rows[name].partition(";")[0] == str(defaults[name])
    window = rows["duplicateDetectionHistoryTimeWindow"]
    assert parse_duration_ms(window.strip("`")) == defaults["duplicateDetectionHistoryTimeWindow"]
    for name in ("requiresSession", "requiresDuplicateDetection", "enablePartitioning"):
        assert rows[name] == str(defaults[name]).lower()
    for name in ("forwardTo", "forwardDeadLetteredMessagesTo"):
        assert (rows[name], defaults[name]) == ("none", None)
    assert (rows["autoDeleteOnIdle"], defaults["autoDeleteOnIdle"]) == ("never", MAX_DURATION_MS)


# --- commands -----------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Return the words of each simple command, without comments; `$ ` prompts are dropped."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while joints := [at for at, word in enumerate(words) if word in ("&&", "|")]:
            found.append(words[: joints[0]])
            words = words[joints[0] + 1 :]
        found.append(words)
    return [words for words in found if words]


def check_command(words: list[str], bus: DevBus) -> None:
    """Check that a command exists as written; run it where that costs nothing."""
    match words:
        case ["make", target]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{re.escape(target)}:.*##", makefile, re.MULTILINE), target
        case ["pip", "install", requirement]:
            check_requirement(requirement)
        case ["pip", "install", requirement, "pyspark[pipelines]"]:
            check_requirement(requirement)
            assert '"pyspark[pipelines]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        case ["cd", folder]:
            assert (ROOT / folder).is_dir()
        case ["SPARK_CONF_DIR=.", "spark-pipelines", "run"]:  # test_declarative.py does
            assert (ROOT / "examples/pipeline/declarative/spark-pipeline.yml").is_file()
        case ["postbus", *arguments]:
            check_postbus(arguments)
        case ["postbus-operator"]:
            assert "\npostbus-operator = " in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        case ["export", "PATH=$PWD/.venv-demo/bin:$PATH"]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert "\nDEMO_BIN := .venv-demo/bin\n" in makefile
        case ["export", assignment]:
            check_variable(assignment.partition("=")[0])
        case ["python", program, *_]:
            assert (ROOT / program).is_file()
        case ["curl", "-s", url]:
            assert url.endswith(f":{Settings.model_fields['metrics_port'].default}/metrics")
        case ["sed", _, path, ">", _]:
            assert (ROOT / path).is_file()
        case ["grep", pattern]:  # of the metrics
            assert any(pattern in line for line in metric_lines(bus).splitlines())
        case _:
            raise AssertionError(f"nobody checks {words}")


def metric_lines(bus: DevBus) -> str:
    with urllib.request.urlopen(bus.metrics, timeout=LIMIT_S) as response:
        return response.read().decode()  # type: ignore[no-any-return]


def count_of(bus: DevBus, state: str) -> int:
    """Return how many messages the metrics of `orders` show."""
    line = rf'^postbus_messages{{entity="orders",kind="queue",state="{state}"}} (\d+)\.0$'
    found = re.search(line, metric_lines(bus), re.MULTILINE)
    assert found is not None
    return int(found[1])


def check_requirement(requirement: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.fullmatch(r"([\w-]+|\.)\[([\w,]+)\]", requirement)
    assert found is not None
    assert found[1] in {project["name"], "."}  # the clone
    assert set(found[2].split(",")) <= set(project["optional-dependencies"])


def check_postbus(arguments: list[str]) -> None:
    """Parse a command line as the program would, without running it."""
    command = typer.main.get_command(app)
    name, rest = "postbus", arguments
    while rest and rest[0] in (within := getattr(command, "commands", {})):
        name, *rest = rest
        command = within[name]
    assert name != "postbus", arguments
    assert not (rest and hasattr(command, "commands")), arguments
    if ">" in rest:
        rest = rest[: rest.index(">")]
    command.make_context(name, list(rest))


CLIENT_VARIABLES = {"POSTBUS_CONTEXT", "POSTBUS_CONNECTION_STRING", "POSTBUS_CA_FILE"}


def check_variable(name: str) -> None:
    if name in CLIENT_VARIABLES or name.startswith("OTEL_"):
        return
    if name.startswith(OPERATOR_PREFIX):
        assert name.removeprefix(OPERATOR_PREFIX).lower() in OperatorSettings.model_fields, name
        return
    assert name.removeprefix("POSTBUS_").lower() in Settings.model_fields, name


CHECKED_COMMANDS = [
    each for each in snippets("sh") if each.page not in (HTTP, ADMINISTRATION, BULK)
]


@pytest.mark.parametrize("snippet", CHECKED_COMMANDS, ids=str)
def test_commands_exist(snippet: Snippet, dev_bus: DevBus) -> None:
    found = commands(snippet.text)
    assert found
    for words in found:
        check_command(words, dev_bus)


def options_of(command: Any) -> set[str]:
    """Return the options of a command and of those within it."""
    found = {option for parameter in command.params for option in parameter.opts}
    return found.union(*map(options_of, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in UNREAD], ids=lambda p: p.stem
)
def test_commands_and_options_within_sentences_exist(page: Path, dev_bus: DevBus) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    options = options_of(typer.main.get_command(app))
    for span in (" ".join(found.split()) for found in INLINE.findall(text)):
        words = span.split()
        if span.startswith("--"):
            assert words[0] in options, span
        elif span.startswith("POSTBUS_"):
            check_variable(re.match(r"\w+", span)[0])  # type: ignore[index]
        elif words[0] == "make" or (words[0] == "postbus" and len(words) > 1):
            check_command(words, dev_bus)
