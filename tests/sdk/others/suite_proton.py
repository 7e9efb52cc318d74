"""Qpid Proton with SASL PLAIN: a key's name and the key, over TLS on the registered port."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from proton import ConnectionException, Endpoint, Message, SSLDomain
from proton.reactor import ReceiverOption
from proton.utils import BlockingConnection, LinkDetached

LONG_S = 20
HOST = "sdk-suite.servicebus.windows.net"


def connect(
    user: str = "RootManageSharedAccessKey", key: str = "SAS_KEY_VALUE"
) -> BlockingConnection:
    domain = SSLDomain(SSLDomain.MODE_CLIENT)
    domain.set_trusted_ca_db(os.environ["POSTBUS_CA_FILE"])
    domain.set_peer_authentication(SSLDomain.VERIFY_PEER_NAME)
    return BlockingConnection(
        f"amqps://{HOST}:5671",
        timeout=LONG_S,
        ssl_domain=domain,
        user=user,
        password=key,
        allowed_mechs="PLAIN",
    )


class ByHand(ReceiverOption):
    """A receiver that settles by hand."""

    def apply(self, link: object) -> None:
        link.snd_settle_mode = 0  # type: ignore[attr-defined]


@pytest.fixture
def connection() -> Iterator[BlockingConnection]:
    opened = connect()
    yield opened
    opened.close()


def test_a_message_is_sent_and_accepted(connection: BlockingConnection) -> None:
    sender = connection.create_sender("plain-1")
    sender.send(Message(body="hello", id="id-1", subject="s", properties={"n": 1}))
    receiver = connection.create_receiver("plain-1", credit=1, options=ByHand())
    message = receiver.receive(LONG_S)
    assert (message.body, message.id, message.subject) == ("hello", "id-1", "s")
    assert message.properties == {"n": 1}
    receiver.accept()
    sender.close()
    assert sender.link.state & Endpoint.REMOTE_CLOSED


def test_released_message_comes_again_and_rejected_one_is_dead_lettered(
    connection: BlockingConnection,
) -> None:
    connection.create_sender("plain-2").send(Message(body="x"))
    receiver = connection.create_receiver("plain-2", credit=2, options=ByHand())
    receiver.receive(LONG_S)
    receiver.release(delivered=False)
    assert receiver.receive(LONG_S).delivery_count == 0
    receiver.reject()
    receiver.close()
    dead = connection.create_receiver("plain-2/$DeadLetterQueue", credit=1)
    assert dead.receive(LONG_S).body == "x"
    dead.accept()


def test_topics(connection: BlockingConnection) -> None:
    connection.create_sender("topic-1").send(Message(body="news"))
    receiver = connection.create_receiver("topic-1/Subscriptions/all", credit=1)
    assert receiver.receive(LONG_S).body == "news"
    receiver.accept()


def test_wrong_keys_names_and_rights(connection: BlockingConnection) -> None:
    with pytest.raises(ConnectionException):
        connect(key="wrong")
    with pytest.raises(LinkDetached, match="not-found"):
        connection.create_sender("nowhere")
    with pytest.raises(LinkDetached, match="unauthorized"):
        connect("listener", "l1sten/+l1sten/+l1sten/+").create_sender("plain-3")
