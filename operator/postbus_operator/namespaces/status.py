"""Conditions and status of a Namespace, from one look at its objects and its bus."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, NamedTuple

from postbus.contract.control import NamespaceDescription, Status
from postbus_operator.bus.synced_keys import KeysResult
from postbus_operator.children.bus import BROKER, Bus
from postbus_operator.conditions import Conditions, timestamp
from postbus_operator.failures import former_status
from postbus_operator.namespaces.workloads import STORE_EXIT, PodTrouble, Workload
from postbus_operator.objects import Resource
from postbus_operator.status import EntityCounts, NamespaceStatus, PartitionStatus

NEWER: Final = "run the newer version"
"""Part of what a broker says of tables that a later version has made."""

RESTORE: Final = (
    "the messages are safe; install the newer chart again, or set operatorSpec.image to the newer"
    " image"
)
TOO_NEW: Final = "SchemaTooNew"

Subject = Literal["secrets", "objects", "storage", "bus"]


class Trouble(NamedTuple):
    """Something that stands between a bus and its spec.

    `is_stalled`: only a person can mend it; else the operator goes on when it is gone.
    """

    subject: Subject
    reason: str
    message: str
    is_stalled: bool


class Verdict(NamedTuple):
    """Why a spec is not valid. `stalls_as`: reason of Stalled."""

    reason: str
    message: str
    stalls_as: str = "InvalidSpec"


@dataclass(slots=True)
class Look:
    """What one look at a bus found."""

    resource: Resource
    now: datetime
    bus: Bus | None = None
    verdict: Verdict | None = None
    troubles: list[Trouble] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """Objects that differ from the spec and were left alone (Observe)."""

    stores: list[Workload] = field(default_factory=list)
    store_trouble: str = ""
    broker: Workload | None = None
    broker_trouble: PodTrouble | None = None
    readiness_trouble: str = ""
    """What a broker that runs waits for, in its own words."""

    bus_status: Status | None = None
    description: NamespaceDescription | None = None
    bus_trouble: str = ""
    keys: KeysResult | None = None
    """None: the bus was not asked about keys, and what was said of them stays."""

    @property
    def was_ready(self) -> bool:
        """Whether the bus has answered before."""
        return self.resource.status.get("version") is not None

    @property
    def newer_tables(self) -> str:
        """What a broker says of tables that a newer version has made; "" if it can use all."""
        ended = "" if self.broker_trouble is None else self.broker_trouble.text
        partitions = () if self.bus_status is None else self.bus_status.partitions
        said = (ended, self.readiness_trouble, *(each.trouble or "" for each in partitions))
        text = next((each for each in said if NEWER in each), "")
        return f"{text}: {RESTORE}" if text else ""

    @property
    def loaded(self) -> list[int]:
        """The partitions that work."""
        if self.bus_status is None:
            return []
        return [
            each.partition
            for each in self.bus_status.partitions
            if each.trouble is None and self.bus_status.is_ready
        ]

    @property
    def is_whole(self) -> bool:
        """Whether everything is as wanted, so that nothing but an event asks for another look."""
        return (
            self.verdict is None
            and not self.troubles
            and all(each.is_ready for each in self.stores)
            and self.broker is not None
            and self.broker.is_ready
            and self.description is not None
            and self.bus_status is not None
            and len(self.loaded) == len(self.bus_status.partitions)
        )


def namespace_status(look: Look) -> NamespaceStatus:
    """Return the whole status. What the bus did not answer this time stays as it was."""
    resource, bus = look.resource, look.bus
    former = former_status(resource).model_dump(by_alias=True)
    conditions = conditions_of(look)
    is_new_spec = former.get("observedGeneration") != resource.generation
    updated_at = timestamp(look.now) if is_new_spec else former.get("updatedAt")
    said = {
        **former,
        "observedGeneration": resource.generation,
        "conditions": conditions.all(),
        "createdAt": timestamp(resource.created_at),
        "updatedAt": updated_at,
        "status": "Active" if conditions.status_of("Ready") == "True" else "Unavailable",
        "provisioningState": _provisioning(look, conditions),
    }
    if bus is not None:
        said["serviceBusEndpoint"] = f"sb://{bus.host(bus.name)}/"
        labels = bus.labels(BROKER)
        said["selector"] = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
        said["brokers"] = look.broker.existing if look.broker else 0
        said["readyBrokers"] = look.broker.ready if look.broker else 0
    if look.keys is not None:
        said["binding"] = look.keys.binding
        said["observedSecretVersion"] = look.keys.observed_secret_version
    if look.bus_status is not None:
        loaded = look.loaded
        said["version"] = look.bus_status.program_version
        said["partitions"] = tuple(
            PartitionStatus(
                id=each.partition,
                ready=each.partition in loaded,
                broker=look.bus_status.broker,
                epoch=each.epoch,
                schema_version=each.schema_version,
                catalog_version=each.version,
            )
            for each in look.bus_status.partitions
        )
        said["readyPartitions"] = len(loaded)
        said["desiredPartitions"] = len(look.bus_status.partitions)
    elif former.get("partitions"):
        said["partitions"] = tuple({**each, "ready": False} for each in former["partitions"])
        said["readyPartitions"] = 0
    if look.description is not None:
        totals = look.description.entities
        said["entityCounts"] = EntityCounts(
            queues=totals.queues,
            topics=totals.topics,
            subscriptions=totals.subscriptions,
            unmanaged=totals.unmanaged,
        )
    return NamespaceStatus.model_validate(said)


def conditions_of(look: Look) -> Conditions:
    """Return the conditions of a look."""
    resource = look.resource
    found = Conditions(resource.status.get("conditions", ()), resource.generation, look.now)
    if look.verdict is None:
        found.set("Valid", "True", "Accepted", "the spec is valid")
    else:
        found.set("Valid", "False", look.verdict.reason, look.verdict.message)
    _set_storage(look, found)
    _set_partitions(look, found)
    _set_secrets(look, found)
    if look.differing:
        named = ", ".join(look.differing[:5])
        found.set(
            "Drifted",
            "True",
            "ObserveOnly",
            f"{len(look.differing)} objects differ from the spec ({named}): set"
            " operatorSpec.reconcilePolicy to Manage to change them",
        )
    _set_stalled(look, found)
    _set_ready(look, found)
    if found.status_of("Stalled") != "True" and not look.is_whole and not resource.is_paused:
        reason, message = _progress(look)
        found.set("Reconciling", "True", reason, message)
    return found


def _set_storage(look: Look, found: Conditions) -> None:
    of_storage = _first(look, "storage")
    waiting = [each.name for each in look.stores if not each.is_ready]
    if of_storage is not None:
        found.set("StorageReady", "False", of_storage.reason, of_storage.message)
    elif waiting:
        reason = look.store_trouble or "Postgres starts"
        found.set("StorageReady", "False", "Unreachable", f"waits for {waiting[0]}: {reason}")
    elif look.newer_tables:
        found.set("StorageReady", "False", TOO_NEW, look.newer_tables)
    elif look.broker_trouble is not None and look.broker_trouble.exit_code == STORE_EXIT:
        text = look.broker_trouble.text
        reason = _storage_reason(text, is_refused=True)
        found.set("StorageReady", "False", reason, f"{text}{_advice(look)}")
    elif "the store" in look.readiness_trouble:
        text = look.readiness_trouble
        reason = _storage_reason(text, is_refused=False)
        found.set("StorageReady", "False", reason, f"{text}{_advice(look)}")
    elif look.bus_status is None:
        found.set("StorageReady", "Unknown", "Unreachable", "waits for a broker that can tell")
    elif len(look.loaded) < len(look.bus_status.partitions):
        said = "; ".join(look.bus_status.troubles[:3]) or "partitions are loading"
        is_full = STORE_FULL in said
        reason = "StoreFull" if is_full else "Unreachable"
        found.set("StorageReady", "False", reason, f"{said}: {MORE_SPACE}" if is_full else said)
    else:
        found.set("StorageReady", "True", "Ready", "all databases answer")


AUTHENTICATION: Final = ("authorizationspecification", "password", "role ")
"""Parts of errors of Postgres about a login; `InvalidAuthorizationSpecification` is no entry of
pg_hba.conf."""


STORE_FULL: Final = "the store is full"
"""Part of what a broker says of a partition whose database has no space; receivers go on."""

MORE_SPACE: Final = (
    "set a larger managed.size, which the storage class must allow, or add space to the database;"
    " receive or purge messages only after that"
)


def _storage_reason(text: str, *, is_refused: bool) -> str:
    """Return the reason for what a broker says of its database.

    `is_refused`: the broker does not wait for it, for waiting does not help.
    """
    text = text.lower()
    if any(each in text for each in AUTHENTICATION):
        return "AuthFailed"
    return "Misconfigured" if is_refused else "Unreachable"


def _advice(look: Look) -> str:
    """Return the next step for databases of the user's own."""
    stores = () if look.bus is None else look.bus.spec.operator_spec.storage.stores
    found = {each.postgres.secret_ref.name for each in stores if each.postgres is not None}
    if not found:
        return ""
    return f": repair the database, or correct its address in Secret {', '.join(sorted(found))}"


def _set_partitions(look: Look, found: Conditions) -> None:
    if look.bus_status is None:
        trouble = look.broker_trouble
        is_of_pod = trouble is not None and trouble.exit_code != STORE_EXIT
        reason = "PodNotStarting" if is_of_pod else "NoneReady"
        found.set("PartitionsReady", "False", reason, _bus_trouble(look))
        return
    loaded, all_of_them = len(look.loaded), len(look.bus_status.partitions)
    if loaded == all_of_them:
        found.set("PartitionsReady", "True", "AllReady", f"{loaded} of {all_of_them} are ready")
        return
    first = next((each.trouble for each in look.bus_status.partitions if each.trouble), "")
    reason = "SomeNotReady" if loaded else "NoneReady"
    text = f"{loaded} of {all_of_them} are ready"
    found.set("PartitionsReady", "False", reason, f"{text}: {first}" if first else text)


def _set_secrets(look: Look, found: Conditions) -> None:
    of_secrets = _first(look, "secrets")
    if of_secrets is not None:
        found.set("SecretsSynced", "False", "SourceMissing", of_secrets.message)
    elif look.keys is None:
        former = {each["type"]: each for each in look.resource.status.get("conditions", ())}
        before = former.get("SecretsSynced")
        if before is not None and look.bus_status is None:
            found.set("SecretsSynced", before["status"], before["reason"], before["message"])
    elif look.keys.condition is not None:
        found.set("SecretsSynced", *look.keys.condition)


def _set_stalled(look: Look, found: Conditions) -> None:
    if look.verdict is not None:
        found.set("Stalled", "True", look.verdict.stalls_as, look.verdict.message)
        return
    for each in look.troubles:
        if each.is_stalled:
            found.set("Stalled", "True", each.reason, each.message)
            return
    if look.newer_tables:
        found.set("Stalled", "True", TOO_NEW, look.newer_tables)


def _set_ready(look: Look, found: Conditions) -> None:
    if look.resource.is_paused:
        former = {each["type"]: each for each in look.resource.status.get("conditions", ())}
        status = former.get("Ready", {}).get("status", "Unknown")
        text = "the operator leaves the bus alone: remove the annotation postbus.dev/paused"
        found.set("Ready", status, "Paused", text)
    elif look.verdict is not None:
        found.set("Ready", "False", "Invalid", look.verdict.message)
    elif look.newer_tables and not look.loaded:
        found.set("Ready", "False", TOO_NEW, look.newer_tables)
    elif look.bus_status is None or not look.loaded:
        reason = "BackendUnavailable" if look.was_ready else "Provisioning"
        trouble = look.troubles[0].message if look.troubles else _bus_trouble(look)
        found.set("Ready", "False", reason, trouble)
    elif look.is_whole:
        found.set("Ready", "True", "Ready", "the bus takes messages")
    elif len(look.loaded) < len(look.bus_status.partitions) or look.troubles:
        text = look.newer_tables or _progress(look)[1]
        if look.troubles:
            text = look.troubles[0].message
        found.set("Ready", "True", "Degraded", text)
    else:
        found.set("Ready", "True", "Updating", _progress(look)[1])


def _progress(look: Look) -> tuple[str, str]:
    """Return reason and message of Reconciling."""
    if look.troubles:
        return "Retrying", look.troubles[0].message
    if look.broker is None or not look.was_ready:
        return "Creating", _bus_trouble(look)
    if not look.broker.is_current or not all(each.is_current for each in look.stores):
        return "RollingOut", "pods are replaced by those of the new spec"
    return "Retrying", _bus_trouble(look)


def _bus_trouble(look: Look) -> str:
    """Return what the bus waits for."""
    waiting = [each.name for each in look.stores if not each.is_ready]
    if look.broker is None:
        return look.troubles[0].message if look.troubles else "the brokers are not created yet"
    if look.broker_trouble is not None:
        return f"{look.broker.name}: {look.broker_trouble.text}"
    if waiting:
        return f"waits for {waiting[0]}: {look.store_trouble or 'Postgres starts'}"
    if look.broker.ready < look.broker.wanted:
        return f"{look.broker.name}: {look.readiness_trouble or 'starts'}"
    return look.bus_trouble or "partitions are loading"


def _first(look: Look, subject: Subject) -> Trouble | None:
    return next((each for each in look.troubles if each.subject == subject), None)


def _provisioning(look: Look, conditions: Conditions) -> str:
    if conditions.status_of("Stalled") == "True":
        return "Failed"
    if look.is_whole:
        return "Succeeded"
    return "Updating" if look.was_ready else "Creating"
