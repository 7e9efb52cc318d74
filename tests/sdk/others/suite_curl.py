"""curl: administration and messages over HTTP, with a shared access signature."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import NamedTuple

from tests.edge.bus_thread import sas_token

HOST = "sdk-suite.servicebus.windows.net"
ENTRY = """<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">
<QueueDescription xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect">
<MaxDeliveryCount>3</MaxDeliveryCount></QueueDescription></content></entry>"""


class Answer(NamedTuple):
    """`headers` have lower case names."""

    status: int
    headers: dict[str, str]
    body: str


def curl(method: str, path: str, *more: str, key: str = "SAS_KEY_VALUE") -> Answer:
    url = path if path.startswith("https:") else f"https://{HOST}/{path}"
    token = sas_token(f"https://{HOST}/", "RootManageSharedAccessKey", key, int(time.time()) + 600)
    command = ["curl", "--silent", "--show-error", "--include", "--max-time", "60"]
    command += ["--cacert", os.environ["POSTBUS_CA_FILE"], "--header", f"Authorization: {token}"]
    done = subprocess.run(
        [*command, "--request", method, *more, url], check=True, capture_output=True, text=True
    )
    head, _, body = done.stdout.partition("\n\n")
    first, *lines = head.splitlines()
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), {name.lower(): text for name, _, text in pairs}, body)


def test_a_queue_and_its_messages() -> None:
    typed = ("--header", "Content-Type: application/atom+xml;type=entry;charset=utf-8")
    assert curl("PUT", "curled", *typed, "--data", ENTRY).status == 201
    assert "<MaxDeliveryCount>3</MaxDeliveryCount>" in curl("GET", "curled").body
    properties = "BrokerProperties: " + json.dumps({"MessageId": "m", "Label": "hello"})
    sent = curl(
        "POST", "curled/messages", "--header", properties, "--header", "number: 7", "--data", "body"
    )
    assert sent.status == 201
    locked = curl("POST", "curled/messages/head?timeout=20", "--data", "")
    assert (locked.status, locked.body, locked.headers["number"]) == (201, "body", "7")
    assert json.loads(locked.headers["brokerproperties"])["Label"] == "hello"
    where = locked.headers["location"]
    assert curl("POST", where, "--data", "").status == 200
    assert curl("PUT", where, "--data", "").status == 200
    again = curl("POST", "curled/messages/head?timeout=20", "--data", "")
    assert json.loads(again.headers["brokerproperties"])["DeliveryCount"] == 2
    assert curl("DELETE", again.headers["location"]).status == 200
    assert curl("DELETE", "curled/messages/head?timeout=0").status == 204
    assert curl("DELETE", "curled").status == 200
    assert curl("POST", "curled/messages", "--data", "x").status in (404, 410)


def test_a_wrong_key() -> None:
    assert curl("POST", "plain-1/messages", "--data", "x", key="wrong").status == 401
