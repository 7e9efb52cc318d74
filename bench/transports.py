"""One queue over TCP, TLS and WebSocket: the cost of the layers around AMQP."""

from __future__ import annotations

from functools import partial

from measuring import MAIN_QUEUE, Bench, Result
from messaging import (
    alternate,
    both_ways,
    cpu_of,
    messaging_row,
    rate_of,
    send_and_drain,
    share_of,
    summary_of,
)
from postbus_server import Postbus
from rows import Demand, warm_up
from server import Server

TRANSPORTS = {
    "tcp": "TCP",
    "websocket": "WebSocket",
    "tls": "TLS",
    "wss": "WebSocket in TLS",
}
LEAST = {"websocket": 70, "tls": 75}
"""Percent of the rate over TCP."""


def _transports(bench: Bench, server: Server) -> Result:
    assert isinstance(server, Postbus)
    server.start()
    warm_up(bench, server)
    steps = {}
    for name in TRANSPORTS:
        transport = {"wss": "tls-websocket"}.get(name, name)
        options = ("--transport", transport, "--port", server.http_port)
        send = partial(send_and_drain, bench, server, MAIN_QUEUE, *options)
        both = partial(both_ways, bench, server, MAIN_QUEUE, *options)
        steps[f"{name}_send"] = (send, "send_rate")
        steps[f"{name}_both"] = (both, "each_way_rate")
    shares = [
        (f"{name}_{way}", f"tcp_{way}")
        for name in TRANSPORTS
        for way in ("send", "both")
        if name != "tcp"
    ]
    return summary_of(alternate(bench, steps), shares)


_METRICS = [
    metric
    for name, title in TRANSPORTS.items()
    for way, label in (("send", "sending"), ("both", "both ways"))
    for metric in (
        rate_of(f"{name}_{way}", f"{title}, {label}"),
        *([] if name == "tcp" else [share_of(f"{name}_{way}", f"{title}, {label}")]),
        cpu_of(f"{name}_{way}", f"{title}, {label}"),
    )
]

TRANSPORT_ROWS = (
    messaging_row(
        "transports",
        "TLS and WebSocket beside TCP",
        _transports,
        tuple(_METRICS),
        demands=tuple(
            Demand(f"{name}_{way}_share", None, least, least)
            for name, least in LEAST.items()
            for way in ("send", "both")
        ),
    ),
)
