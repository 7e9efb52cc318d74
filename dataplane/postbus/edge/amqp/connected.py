"""Description of a connected client: identity, activity and idle time."""

from __future__ import annotations

from postbus.contract.control import ConnectionDescription, LinkDescription
from postbus.edge.amqp.connection import AmqpConnection
from postbus.edge.amqp.receiver_links import ReceiverEndpoint
from postbus.edge.amqp.sender_links import SenderEndpoint


def described(connection: AmqpConnection, now_ms: int) -> ConnectionDescription:
    """Return a client as of now, in milliseconds of the engine's clock.

    Links of `$cbs` and `$management` are left out: they carry no messages.
    """
    links = [
        LinkDescription(
            entity=endpoint.path,
            role="receiver" if isinstance(endpoint, ReceiverEndpoint) else "sender",
            credit=endpoint.credit,
            locks=endpoint.locked_count if isinstance(endpoint, ReceiverEndpoint) else 0,
        )
        for endpoint in connection.endpoints().values()
        if isinstance(endpoint, ReceiverEndpoint | SenderEndpoint)
    ]
    return ConnectionDescription(
        connection=connection.connection_id,
        address=connection.address,
        rules=connection.rules(),
        idle_s=max(now_ms - connection.engine.last_received_ms, 0) // 1_000,
        links=links,
    )
