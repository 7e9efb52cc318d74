"""Assembles and runs one bus: store, partitions, catalog; `listeners` opens its ports.

The command line and tests start and stop it. It contains wiring only: it makes no decisions about
messages.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from postbus.assembly.control_listener import Controlled
from postbus.assembly.declared_keys import DeclaredKeys, refuse_public_keys
from postbus.assembly.defining import Defining
from postbus.assembly.listeners import Inside, Listener, ListenError, Listeners
from postbus.assembly.loading import LOADING_S, load_partitions
from postbus.assembly.opening import BusError, Opened, Opening, read_seal
from postbus.assembly.shipping import connect_hosts
from postbus.assembly.store_trouble import explain_store_error
from postbus.broker.access.authz import Authorizer
from postbus.broker.access.own_names import OwnNames
from postbus.broker.administration import Administration
from postbus.broker.audit import Audit
from postbus.broker.bulk import BulkAccess
from postbus.broker.catalog.catalog import Catalog
from postbus.broker.catalog.change_tasks import ChangeTasks
from postbus.broker.catalog.directory import Directory
from postbus.broker.catalog.preconditions import DirectoryRefusal
from postbus.broker.operate.controls import Controls
from postbus.broker.operate.message_operations import MessageOperations
from postbus.broker.operate.readiness import Readiness
from postbus.broker.operate.tracing import TracedRouter
from postbus.broker.partition.clock import ClockMode, EntityClock, ManualClock
from postbus.broker.partition.host import Host
from postbus.broker.partition.trouble import Troubles
from postbus.broker.router import Router
from postbus.broker.writers import WriterAccess
from postbus.contract.entities import EntityKind, Right
from postbus.entity.window import WindowBudget
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectory
from postbus.process.embedded import EmbeddedError, EmbeddedPostgres
from postbus.process.local_bus import Announcement, connection_string
from postbus.process.metrics import BusSample
from postbus.process.sampling import Sampler
from postbus.process.settings import Settings
from postbus.process.stores_file import read_stores_file
from postbus.store.audit import AuditStore
from postbus.store.errors import StoreError, StoreUnavailable
from postbus.store.incarnation import Broker, this_process
from postbus.store.postgres import Store
from postbus.store.stores import Stores
from postbus.store.tombstones import TombstoneStore

if TYPE_CHECKING:
    from postbus.process.tracing import OtlpSpans

__all__ = ["Bus", "BusError"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnStep: TypeAlias = Callable[[str], None]
Prepare: TypeAlias = Callable[[Store, OnStep], Awaitable[None]]

AHEAD_MS = 60_000
"""Difference between clocks of machines above which a warning is logged."""

STOP_S = 20.0
"""Time for closing connections, commits and Postgres beyond the grace period."""


class Bus:
    """One broker process of a bus. `start` once, then `wait` or `stop`.

    Everything runs in one supervised task; an error there ends the bus and is raised by `wait`.
    """

    def __init__(
        self,
        settings: Settings,
        definition: BusDefinition,
        data: DataDirectory,
        *,
        is_embedded: bool,
        dev_clock: ClockMode | None = None,
        on_asked: Callable[[str], None] = lambda _by: None,
        prepare: Prepare | None = None,
        loading_s: float = LOADING_S,
    ) -> None:
        """Prepare a bus; one with a `dev_clock` is for development and allows its time to be moved.

        `on_asked` is called with the requester when another process of the same broker name asks
        this one to end. `prepare` opens `data` if it is not open, and may wait before: it is
        awaited with the first store before any is used, while health is served. Raises
        `SettingsError` for a publicly known key on an address that others reach.
        """
        refuse_public_keys(settings.host, definition)
        self._settings = settings
        self._definition = definition
        self._data = data
        self._is_embedded = is_embedded
        self._dev_clock = dev_clock
        self._on_asked = on_asked
        self._prepare = prepare
        self._loading_s = loading_s
        self._postgres: EmbeddedPostgres | None = None
        self._budget = WindowBudget(settings.window_bytes)
        self._hosts: list[Host] = []
        self._opened: Opened | None = None
        self._defining: Defining | None = None
        self._names = OwnNames(definition.name, settings.dialled_names)
        self._keys = DeclaredKeys(definition, data)
        self._authorizer = Authorizer(names=self._names, is_taken=self._is_taken)
        self._administration: Administration | None = None
        self._audit: Audit | None = None
        self._message_operations: MessageOperations | None = None
        self._writers: WriterAccess  # made with the hosts
        self._listeners = Listeners(settings, definition, data)
        self._sampler: Sampler | None = None
        self._readiness: Readiness | None = None
        self._spans: OtlpSpans | None = None
        self._clocks: dict[Store, EntityClock] = {}
        self._stopping = asyncio.Event()
        self._grace_s = settings.grace_s
        self._task: asyncio.Task[None] | None = None

    # --- life cycle -----------------------------------------------------------------------------

    async def start(self, on_step: OnStep = lambda _: None) -> None:
        """Start; return when clients may connect. Raises `BusError`. `on_step` is called with each
        step.
        """
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(on_step, ready), name="bus")
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self.wait()
            raise BusError("the bus was stopped while it started")

    async def wait(self) -> None:
        """Return when the bus has stopped; raise the error that ended it."""
        assert self._task is not None
        try:
            await asyncio.shield(self._task)
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop cleanly: take no new work, commit accepted messages, release the partitions."""
        self._grace_s = self._settings.grace_s if grace_s is None else grace_s
        self._stopping.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=self._grace_s + STOP_S)
            if late:
                logger.warning("the stop takes too long and is cut short")
                self._task.cancel()
                await asyncio.wait({self._task})
            if not self._task.cancelled() and self._task.exception() is not None:
                logger.debug("bus ended with an error", exc_info=self._task.exception())

    async def redefine(self, definition: BusDefinition) -> None:
        """Apply changed manifests to a running bus, with the keys of their Secrets.

        As at a start: nothing is deleted, and entities are changed by the owner of partition 0.
        Raises `BusError` and `SettingsError`, as at a start; changes before an error stay.
        """
        refuse_public_keys(self._settings.host, definition)
        if definition.name != (name := self._definition.name):
            raise BusError(f"these are manifests of {definition.name}, this bus is {name}")
        assert self._opened is not None
        assert self._defining is not None
        problems = self._opened.namespace.shape.problems(definition.properties)
        if problems:
            raise BusError(f"{'; '.join(problems)}: correct the manifest")
        rules = await asyncio.to_thread(DeclaredKeys(definition, self._data).rules)
        try:
            await self._defining.define(definition, rules)
            await self._opened.namespace.redeclare(definition.declared)
        except DirectoryRefusal as refusal:
            raise BusError(str(refusal)) from refusal
        except StoreError as error:
            raise BusError(explain_store_error(error)) from error
        self._definition = self._keys.definition = definition
        self._opened.rules.declare(rules)

    def cut_short(self) -> None:
        """Stop waiting for clients."""
        self._listeners.abort()

    async def _run(self, report: OnStep, ready: asyncio.Future[None]) -> None:
        stores: Stores | None = None

        def on_step(step: str) -> None:
            if self._readiness is not None:
                self._readiness.step = step
            report(step)

        try:
            if self._is_embedded:
                on_step("starting Postgres")
                await self._start_postgres()
            stores = Stores(
                self._dsns(),
                read=None if self._settings.stores_file is None else self._read_addresses,
                unsafe=self._settings.is_unsafe,
                broker=self._broker(),
                pipelined=self._settings.commits == "pipelined",
            )
            stores.when_asked_to_end(self._on_asked)
            self._clocks = self._make_clocks(stores)
            async with asyncio.TaskGroup() as tasks:
                readiness = Readiness(self._hosts, stores.home_of, stores=stores.all)
                self._readiness = readiness
                sampler = self._sampler = self._make_sampler(stores)
                change_tasks = ChangeTasks(tasks.create_task)
                try:
                    await self._open_metrics(readiness, sampler, may_wait=self._prepare is not None)
                    opened = await self._unless_stopped(
                        self._open(stores, change_tasks, readiness, sampler, on_step)
                    )
                    if opened is not None:
                        self._opened, sampler.directory = opened, opened.directory
                        await self._serve(stores, opened, change_tasks, tasks, on_step, ready)
                finally:
                    await self._listeners.close_metrics()
        finally:
            if stores is not None:
                await stores.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)
            if self._postgres is not None:
                await asyncio.to_thread(self._postgres.stop)

    async def _serve(
        self,
        stores: Stores,
        opened: Opened,
        change_tasks: ChangeTasks,
        tasks: asyncio.TaskGroup,
        on_step: OnStep,
        ready: asyncio.Future[None],
    ) -> None:
        """Load, serve clients, and stop in order when asked to."""
        readiness = self.readiness
        router = self._make_hosts(stores, opened.directory, tasks)
        opened.namespace.on_change.append(lambda _: self._follow_limits())
        self._message_operations = MessageOperations(router, self._hosts)
        self._administration = Administration(
            opened.directory,
            self._hosts,
            TombstoneStore(stores.first),
            opened.namespace,
            change_tasks,
            now_ms=self._clocks[stores.first],
        )
        store, version = AuditStore(stores.first), lambda: self.administration.version
        self._audit = Audit(store, tasks.create_task, version, _wall_ms)
        auditing = tasks.create_task(self._audit.keep_writing(), name="audit")
        on_step("loading partitions")
        following = await self._define_entities(
            self._administration, opened.directory.catalog, tasks
        )
        homes = opened.directory.homes_in_use()
        following += await load_partitions(self._hosts, stores, homes, tasks, self._loading_s)
        self._warn_of_future()
        on_step("opening the listeners")
        tasks.create_task(self._administration.keep_reaping(), name="reap")
        tasks.create_task(self._administration.keep_counting(), name="count")
        try:
            await self._open_listeners(router, opened, readiness, tasks)
            readiness.is_open = True
            ready.set_result(None)
            await self._stopping.wait()
        finally:
            readiness.is_open, readiness.step = False, "stopping"
            for task in following:
                task.cancel()
            self._administration.stop()
            await self._listeners.close(self._grace_s)
            await asyncio.gather(*(host.stop() for host in self._hosts))
            self._audit.stop()
            await auditing

    async def _unless_stopped(self, work: Coroutine[object, object, T]) -> T | None:
        """Return the result of an operation, None when the bus is stopped before."""
        doing = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            for each in (doing, stopping):
                each.cancel()
            await asyncio.gather(doing, stopping, return_exceptions=True)

    # --- store ----------------------------------------------------------------------------------

    async def _start_postgres(self) -> None:
        fast = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
        settings = fast if self._settings.is_unsafe else None
        try:
            self._postgres = EmbeddedPostgres(self._data.postgres, settings=settings)
            await asyncio.to_thread(self._postgres.start)
        except (EmbeddedError, OSError) as error:
            raise BusError(str(error), is_about_store=True) from error

    def _dsns(self) -> list[str]:
        return self._settings.store_dsns if self._postgres is None else [self._postgres.dsn]

    def _read_addresses(self) -> list[str]:
        assert self._settings.stores_file is not None
        return read_stores_file(self._settings.stores_file)

    def _broker(self) -> Broker:
        return Broker(self._settings.broker_name, this_process(self._data.lock_identity))

    async def _open(
        self,
        stores: Stores,
        change_tasks: ChangeTasks,
        readiness: Readiness,
        sampler: Sampler,
        on_step: OnStep,
    ) -> Opened:
        if self._prepare is not None:
            await self._prepare(stores.first, on_step)
            stores.act_as(self._broker())
            await self._open_metrics(readiness, sampler)
        on_step("opening the store")
        opening = Opening(
            stores,
            self._definition,
            read_seal(self._settings, self._data),
            self._keys,
            self._authorizer,
            change_tasks,
            is_embedded=self._is_embedded,
        )
        return await opening.open(lambda why: on_step(f"waiting for the store: {why}"))

    # --- partitions -----------------------------------------------------------------------------

    def _make_clocks(self, stores: Stores) -> dict[Store, EntityClock]:
        """Return a clock for each store, on that store's time; one for all if advanced manually."""
        if self._dev_clock is ClockMode.MANUAL:
            return dict.fromkeys(stores.all, ManualClock(_wall_ms))
        return {store: EntityClock(_monotonic_ms, _wall_ms) for store in stores.all}

    def _make_hosts(self, stores: Stores, directory: Directory, tasks: asyncio.TaskGroup) -> Router:
        partitions = range(directory.limits.partition_count)
        stores_in_use = {stores.home_of(number) for number in partitions}
        troubles = {store: _troubles_of(store) for store in stores_in_use}
        self._hosts += [
            Host(
                partition_id=partition_id,
                store=stores.home_of(partition_id),
                directory=directory,
                clock=self._clocks[stores.home_of(partition_id)],
                budget=self._budget,
                new_seed=lambda: secrets.randbits(64),
                tasks=tasks,
                troubles=troubles[stores.home_of(partition_id)],
            )
            for partition_id in partitions
        ]
        for host in self._hosts[1:]:
            host.ownership.follow(self._hosts[0].ownership)
        directory.follow(self._hosts)
        self._writers = connect_hosts(self._hosts, directory, stores.home_of)
        if not self._settings.is_tracing_enabled:
            return Router(self._hosts, directory)
        self._spans = self._open_spans()
        return TracedRouter(self._hosts, directory, self._spans)

    def _follow_limits(self) -> None:
        for host in self._hosts:
            host.follow_limits()

    def _open_spans(self) -> OtlpSpans:
        try:
            from postbus.process.tracing import OtlpSpans
        except ImportError as error:
            raise BusError(
                "tracing needs packages that are not installed: pip install 'postbus[tracing]'"
            ) from error
        return OtlpSpans(self._definition.name, self._settings.broker_name)

    async def _define_entities(
        self, administration: Administration, catalog: Catalog, tasks: asyncio.TaskGroup
    ) -> list[asyncio.Task[None]]:
        """Apply the manifests, or follow the owner of partition 0; return the task to cancel."""
        following = [tasks.create_task(catalog.keep_following(), name="follow")]
        self._defining = Defining(self._keys, administration, catalog, self.audit)
        following.append(tasks.create_task(self._defining.keep_defining(), name="define"))
        try:
            await self._defining.define(self._definition, self._keys.rules())
        except DirectoryRefusal as refusal:
            cause = refusal.__cause__
            if not isinstance(cause, StoreUnavailable):
                is_about_store = isinstance(cause, StoreError)
                raise BusError(str(refusal), is_about_store=is_about_store) from refusal
            self._defining.postpone(refusal)
        return following

    def _warn_of_future(self) -> None:
        for store, clock in self._clocks.items():
            ahead_ms = clock() - _wall_ms()
            if clock.mode is ClockMode.WALL and ahead_ms > AHEAD_MS:
                logger.warning(
                    "stored times lie in the future, as --clock manual leaves them: locks, expiry"
                    " and schedules stand still until then",
                    extra={"store": store.where, "ahead_ms": ahead_ms},
                )

    # --- listeners ------------------------------------------------------------------------------

    async def _open_listeners(
        self,
        router: Router,
        opened: Opened,
        readiness: Readiness,
        tasks: asyncio.TaskGroup,
    ) -> None:
        bulk = BulkAccess(router, self._hosts, opened.created_ms)
        inside = Inside(
            router=router,
            bulk=bulk,
            writers=self._writers,
            namespace=opened.namespace,
            administration=self.administration,
            authorizer=self._authorizer,
            names=self._names,
            rules=opened.rules,
            audit=self.audit,
            created_ms=opened.created_ms,
            readiness=readiness,
            controlled=self._controlled(router, opened, bulk),
        )
        try:
            await self._listeners.open(inside, tasks)
        except ListenError as error:
            raise BusError(str(error)) from error

    async def _open_metrics(
        self, readiness: Readiness, sampler: Sampler, *, may_wait: bool = False
    ) -> None:
        """Serve metrics and health. `may_wait`: ignore that another process has the port."""
        try:
            await self._listeners.open_metrics(readiness, sampler, self._names)
        except ListenError as error:
            if may_wait and error.is_port_in_use:
                return
            raise BusError(str(error)) from error

    def _make_sampler(self, stores: Stores) -> Sampler:
        def complete(sample: BusSample) -> None:
            self._listeners.add_to(sample)
            sample.authentication_failures = self._authorizer.refused_count

        return Sampler(self._hosts, stores.all, self._clocks[stores.first], self._budget, complete)

    def _controlled(self, router: Router, opened: Opened, bulk: BulkAccess) -> Controlled:
        is_dev = self._dev_clock is not None
        controls = Controls(self._hosts, router, self._hosts[0].clock) if is_dev else None
        return Controlled(
            self.administration,
            opened.rules,
            self._hosts,
            opened.fence,
            self.message_operations,
            bulk,
            self.audit,
            controls,
        )

    def _is_taken(self, path: str) -> bool:
        return self._opened is not None and self._opened.directory.begins(path)

    # --- information ----------------------------------------------------------------------------

    @property
    def administration(self) -> Administration:
        """Catalog changes at run time; only while the bus runs."""
        assert self._administration is not None
        return self._administration

    @property
    def audit(self) -> Audit:
        """Audit of manual changes; only while the bus runs."""
        assert self._audit is not None
        return self._audit

    @property
    def readiness(self) -> Readiness:
        """Readiness for clients, with the reason if not ready; only while the bus runs."""
        assert self._readiness is not None
        return self._readiness

    @property
    def message_operations(self) -> MessageOperations:
        """Message operations; only while the bus runs."""
        assert self._message_operations is not None
        return self._message_operations

    def listeners(self) -> dict[Listener, tuple[str, int]]:
        """Return the addresses for clients of this machine, by listener."""
        return self._listeners.addresses()

    @property
    def authority_file(self) -> Path | None:
        """Certificate authority for clients to trust, if the certificate was made here."""
        return self._listeners.authority_file

    def connection_strings(self) -> list[tuple[str, str]]:
        """Return a title and a connection string for the first rule with all rights."""
        rule = next((one for one in self._definition.rules if Right.MANAGE in one.rights), None)
        if rule is None:
            return []
        key = self._keys.keys_of(None, rule).primary
        endpoint = self._listeners.endpoint()
        if endpoint is None:
            return []
        how, text = endpoint
        return [(f"of {rule.name}, {how}", connection_string(text, rule.name, key))]

    def announcement(self) -> Announcement:
        """Return how the commands of this machine reach the bus; it contains a key."""
        strings = self.connection_strings() if self._dev_clock is not None else []
        endpoint = self._listeners.endpoint()
        token_file = self._listeners.control_token_file
        return Announcement(
            bus=self._definition.name,
            pid=os.getpid(),
            control=self._listeners.control_url,
            connection_string=strings[0][1] if strings else None,
            endpoint=endpoint[1] if endpoint else None,
            token_file=str(token_file) if token_file else None,
            ca_file=str(self.authority_file) if self.authority_file else None,
            metrics=self._listeners.metrics_url,
        )

    def summary(self) -> list[tuple[str, str]]:
        """Return lines about the bus, for people."""
        names: dict[EntityKind, list[str]] = {kind: [] for kind in EntityKind}
        for entry in self._opened.directory.entries() if self._opened else []:
            names[entry.kind].append(entry.name)
        defined = self._opened.namespace.definition if self._opened else self._definition.properties
        lines = [
            ("bus", f"{self._definition.name} ({defined.sku.name.value})"),
            ("queues", _shown(names[EntityKind.QUEUE])),
            *(
                (f"{kind.value}s", _shown(names[kind]))
                for kind in (EntityKind.TOPIC, EntityKind.SUBSCRIPTION)
                if names[kind]
            ),
            ("data", str(self._data.path)),
        ]
        lines += self._listeners.summary()
        if self._dev_clock is not None:
            lines.append(("clock", self._dev_clock.value))
        return lines

    async def sample(self) -> BusSample:
        """Return the current values for metrics."""
        assert self._sampler is not None
        await self._sampler.prepare()
        return self._sampler.sample()


def _shown(names: list[str]) -> str:
    """Return names for people, limited to the first few."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(sorted(names)[:8]) + more or "none"


def _troubles_of(store: Store) -> Troubles:
    return Troubles(lambda: store.where)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first single error of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
