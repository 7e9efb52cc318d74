#!/usr/bin/env python3
"""The load client for HTTP: kept-alive connections, each with one request in flight.

`bench/http_load.py --mode send --port 5672 --queue bench --user RULE --password KEY --count 9000`
prints one line of JSON. Made for little CPU: sockets without buffers in one epoll set, requests
made once.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import os
import select
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import quote_plus

MODES = ("send", "receive", "both")
LIMIT_S = 120


def authorization(host: str, user: str, password: str) -> str:
    resource, expiry = quote_plus(f"http://{host}/"), str(int(time.time()) + 3_600)
    digest = hmac.new(password.encode(), f"{resource}\n{expiry}".encode(), hashlib.sha256).digest()
    signature = quote_plus(base64.b64encode(digest))
    return f"SharedAccessSignature sr={resource}&sig={signature}&se={expiry}&skn={quote_plus(user)}"


@dataclass(slots=True)
class Load:
    """The remaining work, and the duration of each message."""

    count: int
    started: int = 0
    done: int = 0
    refused: str = ""
    latencies_s: list[float] = field(default_factory=list)

    def begin(self) -> bool:
        """Return whether another message is to be processed."""
        if self.refused or self.started >= self.count:
            return False
        self.started += 1
        return True


class Connection:
    """One socket; sends, or receives and completes, one message after the other."""

    def __init__(
        self, address: tuple[str, int], load: Load, first: bytes, is_receiver: bool, auth: bytes
    ) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._load = load
        self._first = first
        self._is_receiver = is_receiver
        self._auth = auth
        self._is_completing = False
        self._at = 0.0
        self._buffer = b""

    def begin(self) -> bool:
        """Start with another message; False when there is none."""
        if not self._load.begin():
            return False
        self._at = time.perf_counter()
        self.socket.sendall(self._first)
        return True

    def read(self) -> bool:
        """Process received bytes; return False when this connection is done."""
        part = self.socket.recv(65_536)
        if not part:
            self._load.refused = "a connection was closed"
            return False
        data = self._buffer + part
        end = data.find(b"\r\n\r\n")
        if end < 0 or len(data) < end + 4 + _length(data, end):
            self._buffer = data
            return True
        self._buffer = b""
        return self._answered(data, data[9:12], end)

    def _answered(self, data: bytes, status: bytes, end: int) -> bool:
        load = self._load
        if self._is_receiver and not self._is_completing and status == b"201":
            at = data.index(b"Location: ") + 10
            url = data[at : data.index(b"\r\n", at)]
            path = url[url.index(b"/", 8) :]
            self._is_completing = True
            self.socket.sendall(b"DELETE %b HTTP/1.1\r\nHost: bench\r\n%b\r\n" % (path, self._auth))
            return True
        if status != (b"200" if self._is_receiver else b"201"):
            load.refused = data[:end].decode() + data[end:][:400].decode(errors="replace")
            return False
        self._is_completing = False
        load.done += 1
        load.latencies_s.append(time.perf_counter() - self._at)
        return self.begin()


def _length(data: bytes, end: int) -> int:
    at = data.find(b"Content-Length: ", 0, end)
    return int(data[at + 16 : data.index(b"\r\n", at)]) if at >= 0 else 0


def run(options: argparse.Namespace) -> dict[str, object]:
    address = (options.host, options.port)
    auth = f"Authorization: {authorization(options.host, options.user, options.password)}\r\n"
    body = os.urandom(options.size)
    send = (
        f"POST /{options.queue}/messages HTTP/1.1\r\nHost: bench\r\n{auth}"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    receive = (
        f"POST /{options.queue}/messages/head?timeout=30 HTTP/1.1\r\nHost: bench\r\n{auth}"
        "Content-Length: 0\r\n\r\n"
    ).encode()
    loads = {
        mode: Load(options.count) for mode in ("send", "receive") if options.mode in (mode, "both")
    }
    epoll = select.epoll()
    open_ones: dict[int, Connection] = {}
    for mode, load in loads.items():
        first = send if mode == "send" else receive
        for _ in range(options.connections // len(loads)):
            each = Connection(address, load, first, mode == "receive", auth.encode())
            open_ones[each.socket.fileno()] = each
            epoll.register(each.socket, select.EPOLLIN)
    start = time.perf_counter()
    ready = {fd for fd, each in open_ones.items() if each.begin()}
    ends = {}
    while ready and time.perf_counter() - start < LIMIT_S:
        for fd, _ in epoll.poll(5):
            if fd in ready and not open_ones[fd].read():
                ready.discard(fd)
        for mode, load in loads.items():
            if load.done == load.count:
                ends.setdefault(mode, time.perf_counter())
    result: dict[str, object] = {"connections": len(open_ones)}
    for mode, load in loads.items():
        elapsed_s = ends.get(mode, time.perf_counter()) - start
        latencies = sorted(load.latencies_s) or [0.0]
        result[f"{mode}_rate"] = load.done / elapsed_s
        result[f"{mode}_ms_p50"] = latencies[len(latencies) // 2] * 1e3
        result[f"{mode}_ms_p99"] = latencies[len(latencies) * 99 // 100] * 1e3
        result["done"] = load.done
        if load.refused or load.done < load.count:
            result["problem"] = load.refused or "it took too long"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--user", required=True)
    parser.add_argument("--password", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--size", type=int, default=1_024)
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
