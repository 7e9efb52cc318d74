"""Election of one replica by a Lease, with an epoch that brokers compare.

The client's elector keeps no count of transitions, so this is an own one. Periods are those of
Kubernetes' own components. A holder that cannot renew stops `renew_deadline_s` after the last
success, others wait `lease_duration_s` from the last change that they have seen: the pause between
covers slow requests. Clocks of machines are not compared: a Lease counts as expired when it did not
change for its duration by the clock of the observer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from postbus_operator.context import LeadershipLost
from postbus_operator.kube.api import Api, ApiError, Conflict, NotFound
from postbus_operator.kube.resource_types import LEASES

TRANSITION_BITS: Final = 24
TRANSITIONS: Final = (1 << TRANSITION_BITS) - 1
"""Bits of the count in an epoch. A whole epoch has more bits than the numbers of metrics."""

JITTER: Final = 0.2
"""Part of the retry period by which standbys spread their attempts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Periods in seconds, and the clocks."""

    lease_duration_s: int
    renew_deadline_s: float
    retry_period_s: float
    monotonic: Callable[[], float]
    now: Callable[[], datetime]


def epoch_of(lease: dict[str, Any]) -> int:
    """Return the epoch of a Lease's holder.

    It grows with each transition, and when the Lease is deleted and made again: then the count
    starts over, but the time of creation is in the upper bits.
    """
    created = datetime.fromisoformat(lease["metadata"]["creationTimestamp"])
    transitions = int(lease["spec"].get("leaseTransitions") or 0)
    return (int(created.timestamp()) << TRANSITION_BITS) + transitions


class Elector:
    """One process's view of the Lease."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes,
        rng: random.Random,
    ) -> None:
        """`identity` must be different in each process, also of the same pod."""
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times
        self._rng = rng
        self._seen: tuple[str, float] = ("", 0.0)
        self._held: dict[str, Any] | None = None
        self._renewed_at = 0.0
        self.answered_at = times.monotonic()
        """Time of the last answer of the API server."""

    async def acquire(self) -> int:
        """Wait until this process holds the Lease; return its epoch. Failures are tried again."""
        while True:
            start = self._times.monotonic()
            try:
                held = await self._try_to_take()
                self.answered_at = self._times.monotonic()
                if held is not None:
                    # Others may count from when it was sent, and its answer may take long.
                    self._held, self._renewed_at = held, start
                    logger.info("leading as %s, epoch %d", self._identity, epoch_of(held))
                    return epoch_of(held)
            except ApiError as error:
                logger.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            await asyncio.sleep(self._times.retry_period_s * self._rng.uniform(1, 1 + JITTER))

    async def hold(self) -> None:
        """Renew the Lease for as long as it can be. Raises LeadershipLost."""
        while True:
            await asyncio.sleep(self._times.retry_period_s)
            left = self._renewed_at + self._times.renew_deadline_s - self._times.monotonic()
            if left <= 0:
                raise LeadershipLost(f"no renewal for {self._times.renew_deadline_s:g} s")
            try:
                async with asyncio.timeout(left):
                    await self._renew()
            except (ApiError, TimeoutError) as error:
                logger.warning("Lease %s/%s not renewed: %r", self._namespace, self._name, error)

    async def still_leads(self) -> bool:
        """Ask for the Lease; return whether it is held by this process with its epoch.

        True as well if the API server does not answer: the broker that raised the question has
        refused the change, and `hold` ends a leader that cannot renew.
        """
        held = self._held
        if held is None:
            return False
        try:
            async with asyncio.timeout(self._times.retry_period_s):
                return epoch_of(await self._read_again(held)) == epoch_of(held)
        except LeadershipLost:
            return False
        except (ApiError, TimeoutError) as error:
            logger.warning("Lease %s/%s not read: %r", self._namespace, self._name, error)
            return True

    async def release(self) -> None:
        """Give the Lease back, so that another replica takes it at once."""
        held, self._held = self._held, None
        if held is None:
            return
        try:
            async with asyncio.timeout(self._times.retry_period_s):
                try:
                    await self._give_back(held)
                except Conflict:
                    # A renewal was on its way when the work ended.
                    await self._give_back(await self._read_again(held))
        except (ApiError, LeadershipLost, TimeoutError) as error:
            logger.warning("Lease not released, it expires: %r", error)

    async def _give_back(self, held: dict[str, Any]) -> None:
        spec = held["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1}
        await self._api.replace(LEASES, held | {"spec": spec})

    async def _try_to_take(self) -> dict[str, Any] | None:
        """Return the Lease if this process has it now."""
        try:
            lease = await self._api.get(LEASES, self._namespace, self._name)
        except NotFound:
            return await self._create()
        spec = lease["spec"]
        version = lease["metadata"]["resourceVersion"]
        now = self._times.monotonic()
        if version != self._seen[0]:
            self._seen = version, now
        duration = spec.get("leaseDurationSeconds") or self._times.lease_duration_s
        if spec.get("holderIdentity") and now < self._seen[1] + duration:
            return None
        transitions = int(spec.get("leaseTransitions") or 0) + 1
        try:
            return await self._api.replace(LEASES, lease | {"spec": self._spec(transitions)})
        except Conflict:
            return None

    async def _create(self) -> dict[str, Any] | None:
        lease = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec(0),
        }
        try:
            return await self._api.create(LEASES, self._namespace, lease)
        except Conflict:
            return None

    async def _renew(self) -> None:
        held = self._held
        assert held is not None
        spec = held["spec"] | {"renewTime": _micro_time(self._times.now())}
        start = self._times.monotonic()
        try:
            self._held = await self._api.replace(LEASES, held | {"spec": spec})
        except (Conflict, NotFound):
            self._held = await self._read_again(held)
            return
        # Others count from when they see the renewal, which cannot be before it was sent.
        self._renewed_at = start
        self.answered_at = self._times.monotonic()

    async def _read_again(self, held: dict[str, Any]) -> dict[str, Any]:
        """Return the Lease if it is still ours: somebody may have labelled it."""
        try:
            found = await self._api.get(LEASES, self._namespace, self._name)
        except NotFound:
            # Its successor has another epoch, which only a new leader can have.
            raise LeadershipLost("the Lease was deleted") from None
        if found["metadata"]["uid"] != held["metadata"]["uid"]:
            raise LeadershipLost("the Lease was deleted and made again")
        holder = found["spec"].get("holderIdentity")
        if holder != self._identity:
            raise LeadershipLost(f"{holder or 'nobody'} holds the Lease")
        return found

    def _spec(self, transitions: int) -> dict[str, Any]:
        now = _micro_time(self._times.now())
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._times.lease_duration_s,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _micro_time(moment: datetime) -> str:
    """Return a time as a Lease has it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
