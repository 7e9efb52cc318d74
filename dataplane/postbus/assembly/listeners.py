"""Assembles the listeners of one bus: AMQP and HTTP for clients, metrics, the control API.

`bus` opens them when the bus is ready and closes them first. All wiring of `edge` is here.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from postbus.assembly.control_listener import Controlled, ControlListener
from postbus.broker.access.authorization_rules import AuthorizationRules
from postbus.broker.access.authz import Authorizer
from postbus.broker.access.own_names import OwnNames
from postbus.broker.administration import Administration
from postbus.broker.audit import Audit
from postbus.broker.bulk import BulkAccess
from postbus.broker.catalog.namespace import Namespace
from postbus.broker.operate.readiness import Readiness
from postbus.broker.router import Router
from postbus.broker.writers import WriterAccess
from postbus.contract.entities import NamespaceLimits
from postbus.edge.access.admission import AdmissionControl
from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.amqp.listener import AmqpListener
from postbus.edge.amqp.subscription_rules import SubscriptionRules
from postbus.edge.amqp.websocket import WebSocketHandler
from postbus.edge.atom.handler import AtomHandler
from postbus.edge.bulk.handler import BulkHandler
from postbus.edge.bulk.writers import WriterCalls
from postbus.edge.certificates import CertificateUnusable, ReloadingContext, Renewal, TlsFiles
from postbus.edge.control.authorization import TokenFileError
from postbus.edge.port_multiplexer import PortMultiplexer
from postbus.edge.runtime.handler import RuntimeHandler
from postbus.edge.web.authorization import HttpAuthorizer
from postbus.edge.web.http_server import HttpServer
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectory
from postbus.process.metrics import BusSample, ListenerSample, MetricsServer, make_registry
from postbus.process.sampling import Sampler
from postbus.process.settings import ANY_ADDRESS, Settings, is_loopback


class Listener(Enum):
    """Listeners for clients; the value is the scheme of their addresses."""

    PLAIN = "amqp"
    TLS = "amqps"
    HTTP = "http"


class ListenError(Exception):
    """A listener cannot be opened; the text is for the user."""

    def __init__(self, message: str, *, is_port_in_use: bool = False) -> None:
        self.is_port_in_use = is_port_in_use
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Inside:
    """Objects behind the listeners. `created_ms`: creation time of the namespace, in real time."""

    router: Router
    bulk: BulkAccess
    writers: WriterAccess
    namespace: Namespace
    administration: Administration
    authorizer: Authorizer
    names: OwnNames
    rules: AuthorizationRules
    audit: Audit
    created_ms: int
    readiness: Readiness
    controlled: Controlled


class Listeners:
    """The listeners of one bus; open them once."""

    def __init__(self, settings: Settings, definition: BusDefinition, data: DataDirectory) -> None:
        self._settings = settings
        self._definition = definition
        self._data = data
        self._throttle = AuthThrottle()
        self._amqp: AmqpListener | None = None
        self._http: HttpServer | None = None
        self._runtime: RuntimeHandler | None = None
        self._front: PortMultiplexer | None = None
        self._metrics: MetricsServer | None = None
        self._control: ControlListener | None = None
        self._reloading: list[asyncio.Task[None]] = []
        self._certificates: dict[str, ReloadingContext] = {}
        self._ports: dict[Listener, int] = {}
        self.authority_file: Path | None = None
        """Certificate authority for clients to trust, if the certificate was made here."""

    async def open(self, inside: Inside, tasks: asyncio.TaskGroup) -> None:
        """Listen; raises `ListenError` when a port cannot be used. The caller closes those already
        open.
        """
        await self._open_front(inside, tasks)
        if self._settings.is_control_enabled:
            await self._open_control(inside, tasks)

    async def open_metrics(self, readiness: Readiness, sampler: Sampler, names: OwnNames) -> None:
        """Serve metrics and health, also before clients may connect; raises `ListenError`.

        Does nothing when they are served already.
        """
        settings = self._settings
        if not settings.is_metrics_enabled or self._metrics is not None:
            return
        metrics = MetricsServer(
            make_registry(sampler.sample),
            readiness.is_ready,
            readiness.troubles,
            sampler.prepare,
            names if is_loopback(settings.metrics_host) else None,
        )
        with _port_errors(settings.metrics_host, settings.metrics_port):
            await metrics.start(settings.metrics_host, settings.metrics_port)
        self._metrics = metrics

    async def _open_front(self, inside: Inside, tasks: asyncio.TaskGroup) -> None:
        settings, name = self._settings, self._definition.name
        limits = inside.administration.limits
        tls: ssl.SSLContext | None = None
        if settings.is_tls_enabled:
            reloading = self._tls_context(inside.namespace)
            self._certificates["messages"] = reloading
            self._reloading.append(tasks.create_task(reloading.watch(), name="certificates"))
            tls = reloading.context
        throttle = self._throttle
        rules = SubscriptionRules(inside.administration, inside.audit, tasks.create_task)
        self._amqp = AmqpListener(
            inside.router, rules, inside.authorizer, limits, tasks, name, throttle=throttle
        )
        http_authorizer = HttpAuthorizer(
            inside.authorizer, name, throttle=throttle, saw=self._amqp.loop_time.saw
        )
        administration = AtomHandler(
            inside.administration,
            inside.rules,
            http_authorizer,
            lambda: time.time_ns() // 1_000_000,
            inside.created_ms,
            inside.audit,
        )
        writers = WriterCalls(inside.writers, http_authorizer, self._amqp.inflight)
        self._runtime = RuntimeHandler(inside.router, http_authorizer, limits, self._amqp.inflight)
        self._http = HttpServer(
            name,
            administration=administration,
            runtime=self._runtime,
            websocket=WebSocketHandler(self._amqp),
            bulk=BulkHandler(inside.bulk, http_authorizer, writers),
            is_healthy=inside.readiness.is_ready,
            names=inside.names if is_loopback(settings.host) else None,
        )
        self._front = PortMultiplexer(
            self._amqp,
            self._http,
            tasks,
            max_connections=limits.max_connections,
            admission_control=AdmissionControl.within(limits.max_connections),
        )
        inside.namespace.on_change.append(lambda _: self._follow(inside.administration.limits))
        wanted: list[tuple[Listener, int, bool, ssl.SSLContext | None]] = []
        if settings.listens_plain:
            wanted.append((Listener.PLAIN, settings.port, True, None))
        if tls is not None:
            wanted.append((Listener.TLS, settings.tls_port, False, tls))
        wanted.append((Listener.HTTP, settings.http_port, settings.listens_plain, tls))
        for listener, port, is_plain, context in wanted:
            with _port_errors(settings.host, port):
                self._ports[listener] = await self._front.listen(
                    settings.host, port, is_plain=is_plain, tls=context
                )

    def _follow(self, limits: NamespaceLimits) -> None:
        """Apply the limits of another tier to new connections and requests."""
        if self._amqp is not None:
            self._amqp.follow_limits(limits)
        if self._runtime is not None:
            self._runtime.follow_limits(limits)
        if self._front is not None:
            self._front.resize(limits.max_connections)

    async def _open_control(self, inside: Inside, tasks: asyncio.TaskGroup) -> None:
        settings, controlled = self._settings, inside.controlled
        context: ssl.SSLContext | None = None
        if settings.is_control_tls:
            reloading = self._tls_context(inside.namespace, settings.control_client_ca_file)
            self._certificates["control"] = reloading
            name = "certificates of the control API"
            self._reloading.append(tasks.create_task(reloading.watch(), name=name))
            context = reloading.context
        with _port_errors(settings.control_host, settings.control_port):
            try:
                assert self._amqp is not None
                self._control = await ControlListener.open(
                    controlled,
                    settings,
                    self._data,
                    inside.readiness,
                    context,
                    self._throttle,
                    self._amqp.described,
                )
            except TokenFileError as error:
                raise ListenError(str(error)) from error

    async def close(self, grace_s: float) -> None:
        """Stop accepting connections; connected clients have `grace_s` to finish."""
        if self._control is not None:
            await self._control.close()
        for task in self._reloading:
            task.cancel()
        if self._front is not None:
            await self._front.close()
        if self._runtime is not None:
            self._runtime.stop()
        if self._amqp is not None and self._http is not None:
            await asyncio.gather(self._amqp.stop(grace_s), self._http.stop(grace_s))

    async def close_metrics(self) -> None:
        """Close metrics, as the last listener: until then they show the progress of the stop."""
        if self._metrics is not None:
            await self._metrics.stop()

    def abort(self) -> None:
        """Stop waiting for clients."""
        if self._amqp is not None:
            self._amqp.abort()
        if self._http is not None:
            self._http.abort()

    # --- TLS ------------------------------------------------------------------------------------

    def _tls_context(
        self, namespace: Namespace, client_authority_file: Path | None = None
    ) -> ReloadingContext:
        settings = self._settings
        certificate, key = settings.tls_certificate_file, settings.tls_key_file
        renewal: Renewal | None = None
        try:
            if certificate is None or key is None:
                renewal = Renewal(self._data.certificates, settings.dialled_names)
                files = renewal.files
                self.authority_file = files.authority_file
                certificate, key = files.certificate_file, files.key_file
            minimum = namespace.definition.minimum_tls_version
            used = TlsFiles(certificate, key, minimum, client_authority_file)
            context = ReloadingContext(used, renewal)
        except CertificateUnusable as error:
            raise ListenError(str(error)) from error
        except (OSError, ValueError) as error:
            raise ListenError(f"no certificate can be generated: {error}") from error
        namespace.on_change.append(lambda changed: context.require(changed.minimum_tls_version))
        return context

    # --- information ----------------------------------------------------------------------------

    def add_to(self, sample: BusSample) -> None:
        """Add the counts of listeners to a sample of the bus."""
        for name, context in self._certificates.items():
            sample.certificate_expiries[name] = context.expires_s
        with suppress(FileNotFoundError):  # a start that waits may not have made it yet
            volume = shutil.disk_usage(self._data.path)
            sample.volume_bytes, sample.volume_free_bytes = volume.total, volume.free
        if self._control is not None:
            answers = self._control.answers
            sample.http_answers = {("control", status): answers[status] for status in answers}
        if self._front is None:
            return
        sample.refused_connections = self._front.refused_count
        sample.admission_control = len(self._front.admission_control)
        sample.cut_unauthenticated = self._front.admission_control.cut_count
        sample.share_refusals = {
            **self._front.amqp.inflight.refusals(),
            **self._front.admission_control.refusals_of_keys(),
            "key_checks": self._throttle.sent_away_count,
        }
        sample.failed_connections = self._front.failed_count
        sample.http_answers |= self._front.http.answers
        for name, listener in (("amqp", self._front.amqp), ("http", self._front.http)):
            sample.listeners.append(
                ListenerSample(name, listener.connection_count, listener.accepted_count)
            )

    def addresses(self) -> dict[Listener, tuple[str, int]]:
        """Return the addresses for clients of this machine, by listener."""
        host = self._settings.host
        shown = "localhost" if host in {"127.0.0.1", "::1", *ANY_ADDRESS} else host
        return {listener: (shown, port) for listener, port in self._ports.items()}

    def endpoint(self) -> tuple[str, str] | None:
        """Return the client address on this machine, and a connection string without a key."""
        found = self.addresses()
        if Listener.PLAIN in found:
            host, port = found[Listener.PLAIN]
            return "without TLS", f"Endpoint=sb://{host}:{port};UseDevelopmentEmulator=true"
        if Listener.TLS in found:
            host, port = found[Listener.TLS]
            return "with TLS", f"Endpoint=sb://{host}:{port}"
        return None

    @property
    def control_url(self) -> str | None:
        """URL of the control API on this machine."""
        return None if self._control is None else self._control.address

    @property
    def metrics_url(self) -> str | None:
        """URL of metrics on this machine."""
        return f"http://localhost:{self._metrics.port}/metrics" if self._metrics else None

    @property
    def control_token_file(self) -> Path | None:
        """File of tokens for the control API."""
        return None if self._control is None else self._control.token_file

    def summary(self) -> list[tuple[str, str]]:
        """Return a title and an address of each listener, for people."""
        lines = []
        for listener, (host, port) in self.addresses().items():
            is_secret = listener is Listener.HTTP and not self._settings.listens_plain
            scheme = "https" if is_secret else listener.value
            lines.append((listener.value, f"{scheme}://{host}:{port}"))
        if self.metrics_url is not None:
            lines.append(("metrics", self.metrics_url))
        if self._control is not None:
            lines.append(("control", self._control.address))
            lines.append(("token", str(self._control.token_file)))
        return lines


@contextmanager
def _port_errors(host: str, port: int) -> Iterator[None]:
    """Raise an error that names the unusable port and the reason."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use by another program: choose another, 0 takes any free one"
        elif error.errno == errno.EACCES:
            reason = "needs more rights than this user has"
        else:
            reason = f"cannot be listened on: {(error.strerror or str(error)).lower()}"
        is_in_use = error.errno == errno.EADDRINUSE
        raise ListenError(f"port {port} on {host} {reason}", is_port_in_use=is_in_use) from error
