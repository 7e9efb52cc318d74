"""`status` of all kinds, which the operator alone writes.

Fields that Azure Service Bus has carry its names. `conditions` follow Kubernetes: one entry a type,
each with the generation of the spec that it was observed for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
Count = Annotated[int, WithJsonSchema({"type": "integer", "format": "int64"})]


class StatusModel(BaseModel):
    """Base of all models here: frozen, camelCase."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )


class Condition(StatusModel):
    """A condition. `lastTransitionTime` changes with `status` only."""

    type: Annotated[str, Field(min_length=1, max_length=63)]
    status: Literal["True", "False", "Unknown"]
    observed_generation: Count | None = None
    last_transition_time: Time
    reason: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Z][A-Za-z]*$")]
    message: Annotated[str, Field(max_length=4_096)]


class Binding(StatusModel):
    """The Secret with a connection string, as the Service Binding specification names it."""

    name: str


class ResourceStatus(StatusModel):
    """Fields that all kinds have."""

    observed_generation: Count | None = None
    conditions: tuple[Condition, ...] = ()
    binding: Binding | None = None
    created_at: Time | None = None
    updated_at: Time | None = None
    observed_secret_version: str | None = None
    """The version of the Secrets that the keys of the resource were last read from."""


class PartitionStatus(StatusModel):
    """A partition. `broker`: its owner; `epoch` rises with each change of owner."""

    id: int
    ready: bool
    broker: str | None = None
    epoch: Count | None = None
    catalog_version: Count | None = None
    schema_version: int | None = None


class EntityCounts(StatusModel):
    """Entities of a bus. `unmanaged`: those that belong to no resource."""

    queues: int
    topics: int
    subscriptions: int
    unmanaged: int


class NamespaceStatus(ResourceStatus):
    """`status` of a Namespace. `selector` and `brokers` serve the scale subresource."""

    status: str | None = None
    provisioning_state: str | None = None
    service_bus_endpoint: str | None = None
    version: str | None = None
    partitions: tuple[PartitionStatus, ...] = ()
    ready_partitions: int | None = None
    desired_partitions: int | None = None
    brokers: int | None = None
    ready_brokers: int | None = None
    selector: str | None = None
    entity_counts: EntityCounts | None = None


class EntityStatus(ResourceStatus):
    """Fields that queues, topics and subscriptions have.

    `entityId` names the incarnation: a deleted and re-created entity has another one. `appliedHash`
    is the hash that the broker answered for the definition in force.
    """

    entity_id: str | None = None
    applied_hash: str | None = None
    owner_uid: str | None = None
    status: str | None = None
    on_auto_delete: str | None = None
    """The effective policy after idle deletion."""

    recreate_requested_at: str | None = None
    """The value of the annotation `postbus.dev/recreate-requested-at` that was seen last."""

    accessed_at: Time | None = None
    size_in_bytes: Count | None = None


class CountDetails(StatusModel):
    """Counts of messages, as in Azure Resource Manager."""

    active_message_count: Count
    dead_letter_message_count: Count
    scheduled_message_count: Count
    transfer_message_count: Count
    transfer_dead_letter_message_count: Count


class QueueStatus(EntityStatus):
    """`status` of a Queue."""

    message_count: Count | None = None
    count_details: CountDetails | None = None
    partitioned: bool | None = None


class TopicStatus(EntityStatus):
    """`status` of a Topic."""

    subscription_count: int | None = None
    count_details: CountDetails | None = None
    partitioned: bool | None = None


class SubscriptionStatus(EntityStatus):
    """`status` of a Subscription."""

    message_count: Count | None = None
    count_details: CountDetails | None = None
    rule_count: int | None = None


class BatchStatus(StatusModel):
    """A batch that the bus has planned, as it was at `time`.

    `attempts`: drivers that began it. `settled`: all of it is processed.
    """

    number: Count
    attempts: int
    settled: bool
    time: Time


class PipelineStatus(ResourceStatus):
    """`status` of a Pipeline. `readerGroup`: the group on the bus, once it is there."""

    reader_group: str | None = None
    exit_code: int | None = None
    """That of the last run, if it failed."""

    last_batch: BatchStatus | None = None
    lag_messages: Count | None = None
    lag_seconds: Count | None = None
