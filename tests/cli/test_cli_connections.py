"""`postbus connections`: the connected clients as the bus reports them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.cli.command_line import CommandLine, folder_with_bus


@pytest.fixture(scope="module")
def here() -> Iterator[CommandLine]:
    with folder_with_bus() as user:
        yield user


@pytest.mark.slow
def test_connections_list_rules_links_credit_and_locks(here: CommandLine) -> None:
    assert here.ok("connections") == "no clients are connected\n"
    (text,) = re.findall(r"^Endpoint=.*", here.announced, re.MULTILINE)
    client = ServiceBusClient.from_connection_string(text)
    with client, client.get_queue_sender("queue.1") as sender:
        sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
        (one,) = here.json("connections")
        assert [each["role"] for each in one["links"]] == ["sender"]
        with client.get_queue_receiver("queue.1", prefetch_count=10) as receiver:
            (message, *_) = receiver.receive_messages(1, max_wait_time=5)
            found = here.json("connections", "QUEUE.1")
            links = [link for each in found for link in each["links"]]
            assert {each["address"] for each in found} == {"127.0.0.1"}
            assert {tuple(each["rules"]) for each in found} == {("RootManageSharedAccessKey",)}
            assert all(0 <= each["idleS"] < 60 for each in found)
            (taking,) = (each for each in links if each["role"] == "receiver")
            assert (taking["entity"], taking["locks"]) == ("queue.1", 2)
            assert taking["credit"] > 0
            receiver.complete_message(message)
            table = here.ok("connections")
            assert "RootManageSharedAccessKey" in table
            assert here.json("connections", "other") == []
    assert here.ok("connections") == "no clients are connected\n"
