"""Assembles the control API of one bus: its handlers, its authorization, its TLS.

`listeners` opens it with the others. It is the only listener not used by messaging clients.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from postbus.broker.access.authorization_rules import AuthorizationRules
from postbus.broker.access.caller_fence import CallerFence
from postbus.broker.administration import Administration
from postbus.broker.audit import Audit
from postbus.broker.bulk import BulkAccess
from postbus.broker.operate.controls import Controls
from postbus.broker.operate.message_operations import MessageOperations
from postbus.broker.operate.readiness import Readiness
from postbus.broker.partition.host import Host
from postbus.edge.access.auth_throttle import AuthThrottle
from postbus.edge.control.audit import ControlAudit
from postbus.edge.control.authorization import ControlAuthorizer
from postbus.edge.control.counts import ControlCounts
from postbus.edge.control.development import ControlDevelopment
from postbus.edge.control.entities import ControlEntities
from postbus.edge.control.history import ControlHistory
from postbus.edge.control.messages import ControlMessages
from postbus.edge.control.reader_groups import ControlReaderGroups
from postbus.edge.control.rules import ControlRules
from postbus.edge.control.server import ControlServer
from postbus.edge.control.status import Connections, ControlStatus
from postbus.process.data_directory import DataDirectory
from postbus.process.local_bus import announce_control_port, withdraw_control_port
from postbus.process.settings import ANY_ADDRESS, Settings, is_loopback


@dataclass(frozen=True, slots=True)
class Controlled:
    """Objects shown and changed by the control API. `controls`: of a bus for development only."""

    administration: Administration
    rules: AuthorizationRules
    hosts: Sequence[Host]
    fence: CallerFence
    message_operations: MessageOperations
    bulk: BulkAccess
    audit: Audit
    controls: Controls | None


class ControlListener:
    """The open control API. `token_file` is the file of tokens for callers."""

    def __init__(self, server: ControlServer, token_file: Path, address: str) -> None:
        self._server = server
        self.token_file = token_file
        self.address = address

    @classmethod
    async def open(
        cls,
        controlled: Controlled,
        settings: Settings,
        data: DataDirectory,
        readiness: Readiness,
        context: ssl.SSLContext | None,
        throttle: AuthThrottle,
        connections: Connections,
    ) -> ControlListener:
        """Listen, with TLS when there is a context; `connections` lists connected clients.

        Raises `TokenFileError`, and OSError when the port cannot be used.
        """
        token_file = settings.control_token_file or data.ensure_control_token()
        token_file = token_file.absolute()
        server = _server(controlled, settings, token_file, readiness, throttle, connections)
        host = settings.control_host
        await server.start(host, settings.control_port, context)
        shown = "localhost" if is_loopback(host) or host in ANY_ADDRESS else host
        scheme = "http" if context is None else "https"
        address = f"{scheme}://{shown}:{server.port}"
        announce_control_port(server.port, address, token_file)
        return cls(server, token_file, address)

    @property
    def answers(self) -> Counter[int]:
        """Return the responses sent: status -> count."""
        return self._server.answers

    async def close(self) -> None:
        """Stop accepting connections."""
        withdraw_control_port(self._server.port)
        await self._server.stop()


def _server(
    controlled: Controlled,
    settings: Settings,
    token_file: Path,
    readiness: Readiness,
    throttle: AuthThrottle,
    connections: Connections,
) -> ControlServer:
    """Return the server of the API; raises `TokenFileError`."""
    status = ControlStatus(
        controlled.administration,
        controlled.hosts,
        controlled.fence,
        readiness,
        connections=connections,
        broker_name=settings.broker_name,
        is_development=controlled.controls is not None,
    )
    audit = ControlAudit(controlled.audit)
    operations = {
        **status.operations(),
        **ControlEntities(controlled.administration).operations(),
        **ControlCounts(controlled.administration).operations(),
        **ControlRules(controlled.rules, controlled.administration).operations(),
        **ControlHistory(controlled.administration).operations(),
        **audit.operations(),
        **ControlMessages(controlled.message_operations).operations(),
        **ControlReaderGroups(controlled.bulk).operations(),
        **ControlDevelopment(controlled.controls).operations(),
    }
    accepts_certificates = settings.control_client_ca_file is not None
    authorizer = ControlAuthorizer(token_file, throttle, accepts_certificates=accepts_certificates)
    return ControlServer(operations, authorizer, controlled.fence, audit)
