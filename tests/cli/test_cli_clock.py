"""`postbus clock` and `postbus fault`, against a bus that `postbus dev` runs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import typer
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import MessageLockLostError

from postbus.cli.commands.development import read_duration
from tests.cli.test_cli import assert_fails, postbus, run_here
from tests.dev_bus import FREE_PORTS, DevBus, running_dev_bus

QUEUE = "queue.1"
LONG_S = 10.0


@pytest.fixture(scope="module")
def dev_bus() -> Iterator[DevBus]:
    """Run a bus with a clock to move until the module's tests are done."""
    with running_dev_bus("--clock", "manual") as bus:
        yield bus


def run_clock(bus: DevBus, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, POSTBUS_CONTROL_PORT=bus.control_port)


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the lines of `postbus clock` by their first word."""
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


# --- durations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", "PT1M30S"),
        ("0.5s", "PT0.5S"),
        ("5m", "PT5M"),
        ("2h", "PT2H"),
        ("7d", "P7D"),
        ("1d2h3m4s", "P1DT2H3M4S"),
        ("PT5M", "PT5M"),
        ("P7D", "P7D"),
    ],
)
def test_durations_are_short_or_iso(text: str, expected: str) -> None:
    assert read_duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "5", "m", "5 m", "5x", "-5m", "P", "PT", "5m1h", "1.5h", "5M"]
)
def test_invalid_durations_are_refused_by_the_command_line(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="use 90s, 5m, 2h, 7d"):
        read_duration(text)


# --- with a bus ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_clock_is_shown_and_advanced(dev_bus: DevBus) -> None:
    before = shown(run_clock(dev_bus, "clock"))
    after = shown(run_clock(dev_bus, "clock", "advance", "5m"))
    assert before.keys() == after.keys() == {"clock", "now", "ahead"}
    assert (before["clock"], before["ahead"], after["ahead"]) == ("manual", "PT0S", "PT5M")
    passed = datetime.fromisoformat(after["now"]) - datetime.fromisoformat(before["now"])
    assert timedelta(minutes=5) <= passed < timedelta(minutes=6)
    by_option = run_here("clock", "--control-port", dev_bus.control_port, "advance", "PT1H")
    assert shown(by_option)["ahead"] == "PT1H5M"
    by_option = run_here("clock", "advance", "1d", "--control-port", dev_bus.control_port)
    assert shown(by_option)["ahead"] == "P1DT1H5M"


@pytest.mark.slow
@pytest.mark.behaviour("S84", "S85")
def test_scheduled_message_comes_when_time_is_advanced(dev_bus: DevBus) -> None:
    now = datetime.fromisoformat(shown(run_clock(dev_bus, "clock"))["now"])
    with ServiceBusClient.from_connection_string(dev_bus.connection_string) as client:
        with client.get_queue_sender(QUEUE) as sender:
            sender.schedule_messages(ServiceBusMessage("tomorrow"), now + timedelta(days=1))
        with client.get_queue_receiver(QUEUE) as receiver:
            assert receiver.receive_messages(1, max_wait_time=0.5) == []
            shown(run_clock(dev_bus, "clock", "advance", "1d"))
            (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
            assert str(message) == "tomorrow"
            assert message.enqueued_time_utc == message.scheduled_enqueue_time_utc
            receiver.complete_message(message)


@pytest.mark.slow
def test_locks_are_lost_when_asked_for(dev_bus: DevBus) -> None:
    with ServiceBusClient.from_connection_string(dev_bus.connection_string) as client:
        with client.get_queue_sender(QUEUE) as sender:
            sender.send_messages(ServiceBusMessage("one"))
        with client.get_queue_receiver(QUEUE) as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
            done = run_clock(dev_bus, "fault", "lose-locks", QUEUE)
            assert (done.returncode, done.stdout) == (0, f"all locks of {QUEUE} have expired\n")
            with pytest.raises(MessageLockLostError):
                receiver.complete_message(message)
            (again,) = receiver.receive_messages(1, max_wait_time=LONG_S)
            receiver.complete_message(again)


@pytest.mark.slow
def test_store_is_away_for_a_while_and_the_sdk_gets_over_it(dev_bus: DevBus) -> None:
    done = run_clock(dev_bus, "fault", "store-outage", "1s")
    assert (done.returncode, done.stdout) == (
        0,
        "the store is unavailable to all partitions for PT1S\n",
    )
    with ServiceBusClient.from_connection_string(dev_bus.connection_string) as client:
        with client.get_queue_sender(QUEUE) as sender:
            sender.send_messages(ServiceBusMessage("patient"))  # the SDK repeats it
        with client.get_queue_receiver(QUEUE) as receiver:
            (message,) = receiver.receive_messages(1, max_wait_time=LONG_S)
            assert str(message) == "patient"
            receiver.complete_message(message)
    done = run_clock(dev_bus, "fault", "store-outage", "PT0.1S", "--partition", "3")
    assert (done.returncode, done.stdout) == (
        0,
        "the store is unavailable to partition 3 for PT0.1S\n",
    )


@pytest.mark.slow
def test_refusals_of_the_bus_are_shown(dev_bus: DevBus) -> None:
    done = run_clock(dev_bus, "fault", "lose-locks", "nobody")
    assert_fails(done, 7, "postbus: there is no entity 'nobody'; check its name")
    done = run_clock(dev_bus, "fault", "store-outage", "1s", "--partition", "99")
    assert_fails(done, 7, "partition: must be between 0 and 15")
    done = run_clock(dev_bus, "clock", "advance", "0s")
    assert_fails(done, 7, "duration: must be longer than PT0S")


# --- without a bus ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("clock",), ("clock", "advance", "5m"), ("fault", "lose-locks", "orders")]
)
def test_clock_commands_fail_without_a_bus(command: tuple[str, ...]) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        done = run_here(*command, "--control-port", str(bound.getsockname()[1]))
    assert_fails(done, 7, r"no bus answers at http://127\.0\.0\.1:\d+: start one with postbus dev")


class Admission(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow
def test_clock_commands_fail_when_another_server_answers() -> None:
    with HTTPServer(("127.0.0.1", 0), Admission) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = run_here("clock", "--control-port", str(server.server_port))
        server.shutdown()
    assert_fails(done, 7, r"the server at http://127\.0\.0\.1:\d+ is not the control API of a bus")


@pytest.mark.slow
def test_invalid_clock_arguments_are_usage_errors() -> None:
    assert_fails(run_here("clock", "advance", "5x"), 2, "use 90s, 5m, 2h, 7d")
    assert_fails(run_here("clock", "advance"), 2, "Missing argument")
    assert_fails(run_here("clock", "--control-port", "70000"), 3, "--control-port: input should be")
    assert_fails(run_here("serve", "--clock", "manual"), 2, "No such option: --clock")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "example"),
    [
        (("clock",), "postbus clock advance 5m"),
        (("clock", "advance"), "postbus clock advance 7d"),
        (("fault",), "postbus fault lose-locks orders"),
        (("fault", "store-outage"), "postbus fault store-outage 10s --partition 3"),
        (("dev",), "postbus dev --clock manual"),
    ],
)
def test_help_shows_examples_and_exit_codes(command: tuple[str, ...], example: str) -> None:
    done = run_here(*command, "--help")
    assert done.returncode == 0
    assert example in done.stdout
    code = "5 data directory" if command == ("dev",) else "7 no bus answers, or it refuses"
    assert code in done.stdout


@pytest.mark.slow
def test_taken_control_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = postbus("dev", "--ephemeral", *FREE_PORTS, "--control-port", port)
    assert_fails(done, 5, f"port {port} on 127.0.0.1 is in use")
