"""A REST catalog of Iceberg on a real socket, which keeps its tables in SQLite."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg import exceptions
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest

STATUS = {
    exceptions.NoSuchTableError: 404,
    exceptions.NoSuchNamespaceError: 404,
    exceptions.TableAlreadyExistsError: 409,
    exceptions.NamespaceAlreadyExistsError: 409,
    exceptions.CommitFailedException: 409,
}


class RestCatalog:
    """`lost`: how many answers to commits are lost, after they are made."""

    def __init__(self, folder: Path, token: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tables = SqlCatalog("rest", uri=f"sqlite:///{folder}/rest.db")
        self.token = token
        self.lost = 0
        self.uri = ""

    def answer(self, method: str, path: str, body: Any) -> Any:
        """Return what the catalog answers below /v1."""
        match method, path.strip("/").split("/")[1:]:
            case "GET", ["config"]:
                return {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                self.tables.create_namespace(tuple(body["namespace"]))
                return {"namespace": body["namespace"], "properties": {}}
            case "POST", ["namespaces", namespace, "tables"]:
                made = self.tables.create_table(
                    f"{namespace}.{body['name']}",
                    Schema.model_validate(body["schema"]),
                    body["location"],
                    PartitionSpec.model_validate(body["partition-spec"]),
                    properties=body["properties"],
                )
                return _shown(made)
            case "GET", ["namespaces", namespace, "tables", name]:
                return _shown(self.tables.load_table(f"{namespace}.{name}"))
            case "POST", ["namespaces", namespace, "tables", name]:
                table = self.tables.load_table(f"{namespace}.{name}")
                request = CommitTableRequest.model_validate(body)
                done = self.tables.commit_table(table, request.requirements, request.updates)
                if self.lost:
                    self.lost -= 1
                    raise ConnectionError
                return json.loads(done.model_dump_json(by_alias=True))
        raise exceptions.NoSuchTableError(path)

    @contextmanager
    def running(self) -> Iterator[RestCatalog]:
        catalog = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"
                )
                if self.headers.get("Authorization") != f"Bearer {catalog.token}":
                    return self.reply(401, _error("NotAuthorizedException", "no such token", 401))
                try:
                    found = catalog.answer(self.command, self.path.partition("?")[0], body)
                except ConnectionError:
                    return self.reply(502, _error("ServerError", "the answer was lost", 502))
                except tuple(STATUS) as error:
                    status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
                    return self.reply(status, _error(type(error).__name__, str(error), status))
                return self.reply(200, found)

            do_GET = do_POST = handle_any  # noqa: N815

            def reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.uri = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield self
            server.shutdown()


def _shown(table: Any) -> Any:
    metadata = json.loads(table.metadata.model_dump_json(by_alias=True))
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _error(kind: str, message: str, code: int) -> Any:
    return {"error": {"type": kind, "message": message, "code": code}}
