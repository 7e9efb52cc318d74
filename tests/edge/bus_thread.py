"""A bus on loopback in a thread and loop of its own, for clients that block.

Everything is real but time: entity time is wall time plus an offset that a test moves forward.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote_plus

import pytest
import uvloop
from azure.servicebus import ServiceBusClient

from postbus.assembly.shipping import connect_hosts
from postbus.broker.access.authorization_rules import AuthorizationRules
from postbus.broker.access.authorization_rules import Keys as RuleKeys
from postbus.broker.access.authz import Authorizer, KeyRule
from postbus.broker.access.own_names import OwnNames
from postbus.broker.access.sealing import KeySeal
from postbus.broker.administration import Administration
from postbus.broker.audit import Audit
from postbus.broker.bulk import BulkAccess
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.operate.controls import Controls
from postbus.broker.partition.clock import ManualClock
from postbus.broker.partition.host import Host
from postbus.broker.router import Router
from postbus.contract.entities import (
    LIMITS,
    NamespaceLimits,
    QueueProperties,
    Right,
    RuleProperties,
    Sku,
    SkuProperties,
    SubscriptionProperties,
    TopicProperties,
)
from postbus.contract.namespace import NamespaceDefinition
from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.amqp.listener import AmqpListener
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.amqp.websocket import WebSocketHandler
from postbus.edge.atom.handler import AtomHandler
from postbus.edge.bulk.handler import BulkHandler
from postbus.edge.bulk.writers import WriterCalls
from postbus.edge.certificates import TlsFiles, ensure_certificate, server_context
from postbus.edge.port_multiplexer import PortMultiplexer
from postbus.edge.runtime.handler import RuntimeHandler
from postbus.edge.runtime.receives import Receives
from postbus.edge.web.authorization import HttpAuthorizer
from postbus.edge.web.http_server import HttpServer
from postbus.entity.commands import Command, Enqueue, Refusal, Refused, Reply, Tick
from postbus.entity.partition_state import Counts
from postbus.entity.window import WindowBudget
from postbus.process.data_directory import new_key
from postbus.store.audit import AuditStore
from postbus.store.authorization import AuthorizationStore
from postbus.store.catalog import CatalogStore
from postbus.store.errors import StoreUnavailable
from postbus.store.namespace import NamespaceStore
from postbus.store.postgres import Store
from postbus.store.tombstones import TombstoneStore
from tests.broker.putting import put_queue, put_subscription, put_topic

T = TypeVar("T")

PARTITION_COUNT = 2
TLS_HOST = f"127.{os.getpid() >> 16 & 255}.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}"
"""A loopback address of this process: with TLS the SDK insists on the registered port."""

SDK_READ_S = 0.05
"""Time limit of a read, 0.2 s by default: closing a receiver waits for two that time out."""

WAIT_S = 30.0
MAX_RECEIVES = 20
"""How many HTTP receives may wait at one entity here."""


@dataclass(frozen=True)
class Keys:
    primary: str
    secondary: str | None = None


RULES = (
    KeyRule("RootManageSharedAccessKey", frozenset(Right), Keys("SAS_KEY_VALUE", "other key")),
    KeyRule("sender", frozenset({Right.SEND}), Keys("s3nd=")),
    KeyRule("listener", frozenset({Right.LISTEN}), Keys("l1sten/+=")),
    KeyRule("of-one-queue", frozenset(Right), Keys("only here"), "scoped"),
)


class KeptLog(logging.Handler):
    """Keeps the records of the broker's log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def tracking_ids(self) -> set[str]:
        return {record.tracking_id for record in self.records if hasattr(record, "tracking_id")}

    def errors(self) -> list[str]:
        return [
            record.getMessage() + str(record.exc_info or "")
            for record in self.records
            if record.levelno >= logging.ERROR
        ]


class BusThread:
    """Starts and stops the bus; every method is for the test's own thread."""

    def __init__(
        self,
        dsn: str,
        limits: NamespaceLimits = LIMITS[Sku.STANDARD],
        tls: Path | None = None,
        *,
        has_usual_port: bool = True,
    ) -> None:
        """`tls`: a folder for certificates, when the bus shall have a second listener.

        `has_usual_port`: listen there with TLS, too; one bus of a process can.
        """
        self.limits = limits
        self._tls = tls
        self._has_usual_port = has_usual_port
        self.log = KeptLog()
        self.real_shift_s = 0.0
        self.authorizer = Authorizer(
            RULES, OwnNames("test-bus"), lambda path: self._directory.begins(path)
        )
        self._dsn = dsn
        self._loop = uvloop.new_event_loop()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)
        self._names = itertools.count(1)
        self.clock: ManualClock
        self.router: Router
        self.listener: AmqpListener
        self.receives: Receives
        self.http: HttpServer
        self.throttle: AuthThrottle
        self.front: PortMultiplexer
        self.port: int
        self.authority_file: Path
        self._hosts: list[Host] = []
        self._directory: Directory
        self._controls: Controls
        self._stop: asyncio.Event

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        logging.getLogger("postbus").addHandler(self.log)
        logging.getLogger("postbus").setLevel(logging.INFO)
        self._thread.start()
        self._ready.result(WAIT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        logging.getLogger("postbus").removeHandler(self.log)
        assert not self._thread.is_alive(), "the bus did not stop"

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self.clock = ManualClock(lambda: time.time_ns() // 1_000_000)
        store = Store(self._dsn)
        await store.open()
        self._directory = Directory(
            CatalogStore(store), replace(self.limits, partition_count=PARTITION_COUNT)
        )
        await self._directory.load()
        async with asyncio.TaskGroup() as tasks:
            self._hosts = [
                Host(
                    partition_id=partition_id,
                    store=store,
                    directory=self._directory,
                    clock=self.clock,
                    budget=WindowBudget(64 << 20),
                    new_seed=lambda: secrets.randbits(64),
                    tasks=tasks,
                )
                for partition_id in range(PARTITION_COUNT)
            ]
            self._directory.follow(self._hosts)
            self.writers = connect_hosts(self._hosts, self._directory, lambda _: store)
            self.router = Router(self._hosts, self._directory)
            self._controls = Controls(self._hosts, self.router, self.clock)
            await self._administer(store, tasks)
            self.audit = Audit(
                AuditStore(store),
                tasks.create_task,
                lambda: self._directory.version,
                lambda: time.time_ns() // 1_000_000,
            )
            auditing = tasks.create_task(self.audit.keep_writing())
            self._make_listeners(tasks)
            await self._listen()
            self._ready.set_result(None)
            await self._stop.wait()
            await self.front.close()
            await asyncio.gather(self.listener.stop(1.0), self.http.stop(1.0))
            for host in self._hosts:
                await host.stop()
            self.audit.stop()
            await auditing
        await store.close()

    def _make_listeners(self, tasks: asyncio.TaskGroup) -> None:
        hours = itertools.count(0, 3_600)
        self.throttle = AuthThrottle(lambda: next(hours))  # each refusal is the first for long
        self.listener = AmqpListener(
            self.router,
            SubscriptionRules(self.administration, self.audit, tasks.create_task),
            self.authorizer,
            self.limits,
            tasks,
            "test-bus",
            self.real_time_s,
            self.throttle,
        )
        self.receives = Receives(self.router, MAX_RECEIVES)
        http_authorizer = HttpAuthorizer(
            self.authorizer,
            "test-bus",
            self.real_time_s,
            self.throttle,
            self.listener.loop_time.saw,
        )
        administration = AtomHandler(
            self.administration,
            self.authorization_rules,
            http_authorizer,
            lambda: time.time_ns() // 1_000_000,
            created_ms=1_700_000_000_000,
            audit=self.audit,
        )
        runtime = RuntimeHandler(
            self.router, http_authorizer, self.limits, self.listener.inflight, self.receives
        )
        self.http = HttpServer(
            "test-bus",
            administration=administration,
            runtime=runtime,
            websocket=WebSocketHandler(self.listener),
            bulk=BulkHandler(
                BulkAccess(self.router, self._hosts, 1_700_000_000_000),
                http_authorizer,
                WriterCalls(self.writers, http_authorizer, self.listener.inflight),
            ),
        )
        self.front = PortMultiplexer(self.listener, self.http, tasks)

    async def _listen(self) -> None:
        if self._tls is not None:
            files = ensure_certificate(self._tls, ["localhost", TLS_HOST])
            self.authority_file = files.authority_file
            context = server_context(TlsFiles(files.certificate_file, files.key_file))
            if self._has_usual_port:
                await self.front.listen(TLS_HOST, 5671, is_plain=False, tls=context)
            self.port = await self.front.listen("127.0.0.1", 0, tls=context)
        else:
            self.port = await self.front.listen("127.0.0.1", 0)

    async def _administer(self, store: Store, tasks: asyncio.TaskGroup) -> None:
        """Let definitions and authorization rules be changed while it runs."""
        sku = next((sku for sku, limits in LIMITS.items() if limits == self.limits), Sku.STANDARD)
        change_tasks = ChangeTasks(tasks.create_task)
        self.administration = Administration(
            self._directory,
            self._hosts,
            TombstoneStore(store),
            Namespace(
                "test-bus",
                NamespaceDefinition(sku=SkuProperties(name=sku)),
                NamespaceStore(store),
                self._directory,
            ),
            change_tasks,
            now_ms=self.clock,
        )
        self.authorization_rules = AuthorizationRules(
            AuthorizationStore(store),
            KeySeal(bytes(32)),
            self._directory,
            self.authorizer,
            RULES,
            new_key,
            change_tasks,
            keep_no_keys,
        )
        await self.authorization_rules.load()
        self._directory.catalog.on_read.append(self.authorization_rules.load)
        self._directory.on_deletion(lambda _: self.authorization_rules.refresh())

    # --- actions of tests
    # ---------------------------------------------------------------------------

    def real_time_s(self) -> float:
        """Return the time of tokens, which a test may move forward."""
        return time.time() + self.real_shift_s

    def age_tokens(self, duration_s: float) -> None:
        """Move the time of tokens forward and check them."""
        self.real_shift_s += duration_s
        self.look_in(16)

    def set_rules(self, *rules: KeyRule) -> None:
        """Let other authorization rules count."""

        async def replace() -> None:
            self.authorizer.replace(rules)

        self.run(replace())

    def look_in(self, duration_s: float) -> None:
        """Look at all connections as if some time had passed for them."""

        async def look() -> None:
            now_ms = time.monotonic_ns() // 1_000_000 + int(duration_s * 1_000)
            for transport in list(self.listener._connections):
                transport.tick(now_ms)

        self.run(look())

    def run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def queue(self, name: str | None = None, **properties: object) -> str:
        """Create a queue and return its name."""
        name = name or f"queue-{next(self._names)}"
        self.run(put_queue(self._directory, name, QueueProperties.model_validate(properties)))
        return name

    def topic(self, name: str | None = None, **properties: object) -> str:
        """Create a topic and return its name."""
        name = name or f"topic-{next(self._names)}"
        self.run(put_topic(self._directory, name, TopicProperties.model_validate(properties)))
        return name

    def subscription(
        self,
        topic: str,
        name: str = "all",
        rules: list[RuleProperties] | None = None,
        **properties: object,
    ) -> str:
        """Create a subscription and return its name; None gives it the rule that takes all."""
        checked = SubscriptionProperties.model_validate(properties)
        self.run(put_subscription(self._directory, topic, name, checked, rules))
        return name

    def change(self, name: str, **properties: object) -> None:
        self.queue(name, **properties)

    def delete(self, name: str) -> None:
        assert self.run(self._directory.delete(name))

    def advance(self, duration_ms: int) -> None:
        """Move entity time forward; due events have happened when this returns."""
        assert self.run(self._controls.advance(duration_ms)) == []

    def now(self) -> datetime:
        """Return entity time."""
        return datetime.fromtimestamp(self.clock() / 1_000, UTC)

    def refuse_next(
        self,
        monkeypatch: pytest.MonkeyPatch,
        refusal: str,
        kind: type[object] = Enqueue,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the next command of a kind be answered as if the store had failed.

        `then` runs behind that answer in the loop of the bus.
        """
        submit = self.router.submit

        def refuse(
            partition_id: int, command: Command, on_reply: Callable[[Reply], None] | None = None
        ) -> None:
            if isinstance(command, kind) and on_reply is not None:
                monkeypatch.setattr(self.router, "submit", submit)
                on_reply(Refused(Refusal(refusal)))
                then()
            else:
                submit(partition_id, command, on_reply)

        monkeypatch.setattr(self.router, "submit", refuse)

    def counts(self, name: str) -> Counts:
        async def count() -> Counts:
            entry = self._directory.find(name.lower())
            assert entry is not None
            host = self._hosts[entry.home_partition]
            await host.call(Tick())  # loads the partition before its first use
            counts = host.counts(entry.entity_no)
            assert counts is not None
            return counts

        return self.run(count())

    def reload(self, name: str) -> None:
        """Drop a partition's memory as a failed commit does; locks are lost with it."""

        async def drop() -> None:
            self.drop(name)

        self.run(drop())

    def drop(self, name: str) -> None:
        """Reload from the loop of the bus."""
        entry = self._directory.find(name.lower())
        assert entry is not None
        host = self._hosts[entry.home_partition]
        before = host.reload_count
        host._recovery.wait_s = 0.0  # failures of other tests were long ago
        assert host._journal is not None
        host._journal.fail(StoreUnavailable("a commit failed, says the test"))
        assert host.reload_count == before + 1

    def reload_count(self, name: str) -> int:
        """Return the number of reloads of an entity's partition."""
        entry = self._directory.find(name.lower())
        assert entry is not None
        return self._hosts[entry.home_partition].reload_count

    # --- how clients reach it -------------------------------------------------------------------

    def connection_string(self, rule: str = RULES[0].name, key: str | None = None) -> str:
        if key is None:
            key = next(each.keys.primary for each in RULES if each.name == rule)
        return (
            f"Endpoint=sb://localhost:{self.port};SharedAccessKeyName={rule};"
            f"SharedAccessKey={key};UseDevelopmentEmulator=true"
        )

    def client(
        self, rule: str = RULES[0].name, key: str | None = None, **given: object
    ) -> ServiceBusClient:
        """Return the unmodified SDK's client, without retries unless `given` has some."""
        options: dict[str, object] = {"retry_total": 0, **given}
        if "transport_type" not in given:
            options.setdefault("socket_timeout", SDK_READ_S)
        return ServiceBusClient.from_connection_string(self.connection_string(rule, key), **options)


async def keep_no_keys(_rule: KeyRule, _keys: RuleKeys) -> bool:
    return False


def sas_token(resource: str, rule: str, key: str, expires_s: int) -> str:
    """Return a shared access signature as an SDK makes it."""
    encoded = quote_plus(resource)
    digest = hmac.new(key.encode(), f"{encoded}\n{expires_s}".encode(), hashlib.sha256).digest()
    signature = quote_plus(base64.b64encode(digest))
    return f"SharedAccessSignature sr={encoded}&sig={signature}&se={expires_s}&skn={rule}"
