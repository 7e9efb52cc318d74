"""Models of manifests, one for each kind, with all fields.

`reader` reads documents with these and gives them a meaning. A word that is known but not built
yet is refused; what only the operator needs is let through.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field

from postbus.contract.entities import (
    Model,
    NamespaceProperties,
    QueueFields,
    Retention,
    RuleProperties,
    Rules,
    SubscriptionFields,
    TopicProperties,
    check_entity_name,
    check_namespace_name,
    check_subscription_name,
    not_yet,
)
from postbus.contract.namespace import SoftDelete

API_VERSION: Final = "postbus.dev/v1alpha1"
MAX_RULES: Final = 100
"""Rules of one Subscription: two thousand would not fit an object of the API server."""


class Metadata(Model):
    """The part of Kubernetes' metadata that means something here; the rest is let through."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    namespace: str = Field("default", min_length=1, max_length=63)


class AllowedNamespaces(Model):
    """Which cluster namespaces may hold entities of the bus."""

    source: Literal["Same", "All", "Selector"] = Field("Same", alias="from")
    selector: dict[str, Any] | None = None


class NamespaceOperatorSpec(Model):
    """For the operator. Without it only `allowedNamespaces` and `softDelete` mean something."""

    allowed_namespaces: AllowedNamespaces = Field(AllowedNamespaces(), alias="allowedNamespaces")
    image: Any = None
    brokers: int | None = Field(None, ge=1)
    resources: Any = None
    storage: Any = None
    pod_template: Any = Field(None, alias="podTemplate")
    tls: Any = None
    network_policy: Any = Field(None, alias="networkPolicy")
    pod_disruption_budget: Any = Field(None, alias="podDisruptionBudget")
    soft_delete: SoftDelete = Field(SoftDelete(), alias="softDelete")
    deletion_policy: Literal["Delete", "DeleteIfEmpty", "Retain"] | None = Field(
        None, alias="deletionPolicy"
    )
    deletion_protection: bool = Field(False, alias="deletionProtection")
    reconcile_policy: Literal["Manage", "Observe", "DetachOnDelete"] | None = Field(
        None, alias="reconcilePolicy"
    )
    upgrade_strategy: Any = Field(None, alias="upgradeStrategy")
    secrets: Any = None


class History(Model):
    """Retention of settled messages; without it none are kept."""

    retention_ms: Retention | None = Field(None, alias="retention")


class EntityOperatorSpec(Model):
    """For the operator; a bus without one checks the words and goes on."""

    deletion_policy: Literal["Delete", "DeleteIfEmpty", "Retain"] | None = Field(
        None, alias="deletionPolicy"
    )
    deletion_protection: bool = Field(False, alias="deletionProtection")
    reconcile_policy: Literal["Manage", "Observe", "DetachOnDelete"] | None = Field(
        None, alias="reconcilePolicy"
    )
    on_auto_delete: Literal["KeepResource", "Recreate", "DeleteResource"] | None = Field(
        None, alias="onAutoDelete"
    )
    adopt: Literal["IfMatching", "Always", "Never"] | None = None
    secrets: Any = None


class StoredOperatorSpec(EntityOperatorSpec):
    """The same for what holds messages; `history` means something without an operator too."""

    history: History = Field(History())


def _refuse_history(value: object) -> None:
    if value is not None:
        raise ValueError("a topic stores no messages: give its subscriptions a history")


class TopicOperatorSpec(EntityOperatorSpec):
    """The same for topics."""

    history: Annotated[Any, AfterValidator(_refuse_history)] = None


class Owner(Model):
    """The owner of an entity: a bus namespace, or the topic of a subscription.

    The owner's cluster namespace defaults to that of the entity.
    """

    name: str = Field(min_length=1)
    namespace: str | None = Field(None, min_length=1)


class NamespaceSpec(NamespaceProperties):
    """`spec` of kind Namespace."""

    entity_name: Annotated[str, AfterValidator(check_namespace_name)] | None = Field(
        None, alias="entityName"
    )
    operator_spec: NamespaceOperatorSpec = Field(NamespaceOperatorSpec(), alias="operatorSpec")


class QueueSpec(QueueFields):
    """`spec` of kind Queue."""

    owner: Owner
    entity_name: Annotated[str, AfterValidator(check_entity_name)] | None = Field(
        None, alias="entityName"
    )
    authorization_rules: Rules = Field((), alias="authorizationRules")
    operator_spec: StoredOperatorSpec = Field(StoredOperatorSpec(), alias="operatorSpec")

    @property
    def history_retention_ms(self) -> int | None:
        """How long settled messages are kept, or None."""
        return self.operator_spec.history.retention_ms


class TopicSpec(TopicProperties):
    """`spec` of kind Topic."""

    owner: Owner
    entity_name: Annotated[str, AfterValidator(check_entity_name)] | None = Field(
        None, alias="entityName"
    )
    authorization_rules: Rules = Field((), alias="authorizationRules")
    operator_spec: TopicOperatorSpec = Field(TopicOperatorSpec(), alias="operatorSpec")


class SubscriptionSpec(SubscriptionFields):
    """`spec` of kind Subscription. Without `rules` it gets every message of its topic."""

    owner: Owner
    entity_name: Annotated[str, AfterValidator(check_subscription_name)] | None = Field(
        None, alias="entityName"
    )
    rules: tuple[RuleProperties, ...] | None = Field(None, max_length=MAX_RULES)
    duplicate_detection_history_time_window: Any = Field(
        None, alias="duplicateDetectionHistoryTimeWindow"
    )
    """Present in Azure's templates, without a meaning there either."""

    is_client_affine: Annotated[bool, not_yet(False, "subscriptions of one client are")] = Field(
        False, alias="isClientAffine"
    )
    client_affine_properties: Annotated[Any, not_yet(None, "subscriptions of one client are")] = (
        Field(None, alias="clientAffineProperties")
    )
    operator_spec: StoredOperatorSpec = Field(StoredOperatorSpec(), alias="operatorSpec")

    @property
    def history_retention_ms(self) -> int | None:
        """How long settled messages are kept, or None."""
        return self.operator_spec.history.retention_ms


class NamespaceDocument(Model):
    """A whole document of kind Namespace."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Namespace"]
    metadata: Metadata
    spec: NamespaceSpec


class QueueDocument(Model):
    """A whole document of kind Queue."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Queue"]
    metadata: Metadata
    spec: QueueSpec


class TopicDocument(Model):
    """A whole document of kind Topic."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Topic"]
    metadata: Metadata
    spec: TopicSpec


class SubscriptionDocument(Model):
    """A whole document of kind Subscription."""

    api_version: Literal["postbus.dev/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["Subscription"]
    metadata: Metadata
    spec: SubscriptionSpec


class SecretDocument(Model):
    """A whole document of kind Secret: `stringData` wins over `data`, as in Kubernetes."""

    api_version: Literal["v1"] = Field(alias="apiVersion")
    kind: Literal["Secret"]
    metadata: Metadata
    type: str = "Opaque"
    immutable: bool = False
    data: dict[str, str] = Field(default_factory=dict)
    string_data: dict[str, str] = Field(default_factory=dict, alias="stringData")


MODELS: Final[dict[tuple[str, str], type[Model]]] = {
    (API_VERSION, "Namespace"): NamespaceDocument,
    (API_VERSION, "Queue"): QueueDocument,
    (API_VERSION, "Topic"): TopicDocument,
    (API_VERSION, "Subscription"): SubscriptionDocument,
    ("v1", "Secret"): SecretDocument,
}
