"""Programs of the chart, and a bus with TLS for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from postbus.process.embedded import EmbeddedPostgres
from tests.conftest import TEMPLATE, dsn_of, make_database
from tests.edge.bus_thread import RULES, TLS_HOST, BusThread

PROGRAMS: Final = Path(__file__).resolve().parent.parent.parent / "charts" / "postbus" / "files"


def program(name: str) -> ModuleType:
    """Import a program of the chart; those that it imports lie beside it."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PROGRAMS))


@contextmanager
def tls_bus(postgres: EmbeddedPostgres, database: str, folder: Path) -> Iterator[BusThread]:
    """Run a bus until the context ends."""
    make_database(postgres, database, template=TEMPLATE)
    bus = BusThread(dsn_of(postgres, database), tls=folder)
    bus.start()
    try:
        yield bus
    finally:
        bus.stop()


def secret_of(bus: BusThread, queue: str) -> dict[str, bytes]:
    """Return what the operator writes into the Secret of a rule."""
    rule = RULES[0]
    text = (
        f"Endpoint=sb://{TLS_HOST}/;SharedAccessKeyName={rule.name};"
        f"SharedAccessKey={rule.keys.primary};EntityPath={queue}"
    )
    return {
        "connectionString": text.encode(),
        "entityPath": queue.encode(),
        "ca.crt": Path(bus.authority_file).read_bytes(),
    }
