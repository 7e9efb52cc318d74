"""A rig with one queue of sessions."""

from __future__ import annotations

from postbus.contract.entities import QueueProperties
from postbus.entity.commands import Delivery
from postbus.entity.sessions.session_queue import SessionQueue
from tests.entity.partition_rig import QUEUE, Rig, message, name_of

PROPERTIES = QueueProperties(requires_session=True, lock_duration_ms=5_000, max_delivery_count=3)


def rig_of(**settings: object) -> Rig:
    return Rig(PROPERTIES, **settings)  # type: ignore[arg-type]


def queue_of(rig: Rig) -> SessionQueue:
    entity = rig.state.entities.get(QUEUE)
    assert entity is not None
    assert isinstance(entity.active, SessionQueue)
    return entity.active


def send(rig: Rig, session: str, *names: str) -> None:
    rig.send(*(message(name, session=session) for name in names))


def names(deliveries: list[Delivery]) -> list[str]:
    return [name_of(delivery.envelope) for delivery in deliveries]
