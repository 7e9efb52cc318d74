"""The four kinds of resources: documents of manifests, and objects of a Kubernetes API server.

Manifests and objects of the API server are parsed with these models, and custom resource
definitions are generated from them. A known feature that does not exist is rejected by name. Source
of fields: the templates of Azure Service Bus, Azure Service Operator.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from postbus.contract.durations import DurationMs
from postbus.contract.entities import (
    LIMITS,
    DnsName,
    EntityName,
    Model,
    NamespaceName,
    NamespaceProperties,
    QueueFields,
    RuleProperties,
    Rules,
    Sku,
    SubscriptionFields,
    SubscriptionName,
    TopicProperties,
    not_yet,
)
from postbus.contract.operator_spec import (
    NamespaceOperatorSpec,
    StoredOperatorSpec,
    TopicOperatorSpec,
)

API_VERSION: Final = "postbus.dev/v1alpha1"
MAX_RULES: Final = 100
"""Maximum number of rules of a Subscription: 2,000 would not fit an object of the API server."""


class Metadata(Model):
    """The part of Kubernetes' metadata that is used here; other fields are accepted and ignored."""

    model_config = ConfigDict(extra="ignore")

    name: DnsName
    namespace: str = Field("default", min_length=1, max_length=63)


class Owner(Model):
    """The owner of an entity: a bus namespace, or the topic of a subscription.

    The owner's cluster namespace defaults to that of the entity.
    """

    name: str = Field(min_length=1, max_length=253)
    namespace: str | None = Field(None, min_length=1, max_length=63)


class NamespaceSpec(NamespaceProperties):
    """`spec` of kind Namespace."""

    entity_name: NamespaceName | None = Field(None, alias="entityName")
    zone_redundant: bool = Field(False, alias="zoneRedundant")
    """For the operator: brokers in several zones."""

    operator_spec: NamespaceOperatorSpec = Field(NamespaceOperatorSpec(), alias="operatorSpec")

    @model_validator(mode="after")
    def _partitions_suffice(self) -> NamespaceSpec:
        partitions = self.known_partition_count
        if partitions is None:
            return self
        if self.operator_spec.brokers > partitions:
            raise ValueError(f"operatorSpec.brokers: at most one a partition, here {partitions}")
        if len(self.operator_spec.storage.stores) > partitions:
            raise ValueError(
                f"operatorSpec.storage.stores: at most one a partition, here {partitions}"
            )
        return self

    @property
    def known_partition_count(self) -> int | None:
        """The number of partitions; None in Premium without it: that of the store, or 1."""
        if self.sku.name is Sku.PREMIUM:
            return self.premium_messaging_partitions
        return LIMITS[self.sku.name].partition_count


class QueueSpec(QueueFields):
    """`spec` of kind Queue."""

    owner: Owner
    entity_name: EntityName | None = Field(None, alias="entityName")
    authorization_rules: Rules = Field((), alias="authorizationRules")
    operator_spec: StoredOperatorSpec = Field(StoredOperatorSpec(), alias="operatorSpec")

    @property
    def history_retention_ms(self) -> int | None:
        """Retention of settled messages; None: they are deleted."""
        return self.operator_spec.history.retention_ms


class TopicSpec(TopicProperties):
    """`spec` of kind Topic."""

    owner: Owner
    entity_name: EntityName | None = Field(None, alias="entityName")
    authorization_rules: Rules = Field((), alias="authorizationRules")
    operator_spec: TopicOperatorSpec = Field(TopicOperatorSpec(), alias="operatorSpec")


class SubscriptionSpec(SubscriptionFields):
    """`spec` of kind Subscription. Without `rules` it receives every message of its topic."""

    owner: Owner
    entity_name: SubscriptionName | None = Field(None, alias="entityName")
    rules: tuple[RuleProperties, ...] | None = Field(None, max_length=MAX_RULES)
    duplicate_detection_history_time_window: DurationMs | None = Field(
        None, alias="duplicateDetectionHistoryTimeWindow"
    )
    """Present in Azure's templates, where it has no effect either."""

    is_client_affine: Annotated[bool, not_yet(False, "subscriptions of one client are")] = Field(
        False, alias="isClientAffine"
    )
    client_affine_properties: Annotated[Any, not_yet(None, "subscriptions of one client are")] = (
        Field(None, alias="clientAffineProperties")
    )
    operator_spec: StoredOperatorSpec = Field(StoredOperatorSpec(), alias="operatorSpec")

    @property
    def history_retention_ms(self) -> int | None:
        """Retention of settled messages; None: they are deleted."""
        return self.operator_spec.history.retention_ms


class NamespaceDocument(Model):
    """A document of kind Namespace."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Namespace"]
    metadata: Metadata
    spec: NamespaceSpec


class QueueDocument(Model):
    """A document of kind Queue."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Queue"]
    metadata: Metadata
    spec: QueueSpec


class TopicDocument(Model):
    """A document of kind Topic."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Topic"]
    metadata: Metadata
    spec: TopicSpec


class SubscriptionDocument(Model):
    """A document of kind Subscription."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Subscription"]
    metadata: Metadata
    spec: SubscriptionSpec
