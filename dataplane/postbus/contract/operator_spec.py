"""`operatorSpec` of the four kinds: fields for the Kubernetes operator beside Service Bus's fields.

A bus without an operator reads `allowedNamespaces`, `softDelete` and `history` only; the other
fields are checked and have no effect there. Names and shapes are those of Azure Service Operator
where it has them, else those of Kubernetes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from postbus.contract.entities import DnsName, Model, Retention
from postbus.contract.namespace import SoftDelete

MAX_PARTITIONS: Final = 16

DeletionPolicy = Literal["Delete", "DeleteIfEmpty", "Retain"]
ReconcilePolicy = Literal["Manage", "Observe", "DetachOnDelete"]

StoreName = Annotated[
    str, StringConstraints(max_length=30, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
]
"""Part of the names of a StatefulSet and its pods, whose labels have 63 characters at most."""

SecretKey = Annotated[str, StringConstraints(max_length=253, pattern=r"^[A-Za-z0-9._-]+$")]
QUANTITY_PATTERN: Final = (
    r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?$"
)
QuantityText = Annotated[str, StringConstraints(max_length=32, pattern=QUANTITY_PATTERN)]
Quantity = Annotated[int, Field(ge=0)] | QuantityText
"""An amount of CPU, memory or storage, such as `500m`, `1Gi` or 2."""

PERCENT_PATTERN: Final = r"^(100|[1-9]?[0-9])%$"
CountOrPercent = (
    Annotated[int, Field(ge=0, le=MAX_PARTITIONS)]
    | Annotated[str, StringConstraints(pattern=PERCENT_PATTERN)]
)

Labels = Annotated[dict[str, str], Field(max_length=64)]


# --- references ---------------------------------------------------------------------------------


class SecretReference(Model):
    """A key of a Secret in the cluster namespace of the resource."""

    name: DnsName
    key: SecretKey


class DsnReference(SecretReference):
    """A key that holds the address of a database, as `postgresql://user:password@host/name`."""

    key: SecretKey = "dsn"


class CaReference(SecretReference):
    """A key that holds certificates of authorities (PEM)."""

    key: SecretKey = "ca.crt"


class LabelRequirement(Model):
    """An entry of `matchExpressions`, as in Kubernetes."""

    key: str = Field(min_length=1, max_length=317)
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = Field((), max_length=64)

    @model_validator(mode="after")
    def _values_fit_the_operator(self) -> LabelRequirement:
        if bool(self.values) != (self.operator in {"In", "NotIn"}):
            raise ValueError("In and NotIn need values; Exists and DoesNotExist have none")
        return self


class LabelSelector(Model):
    """Selects objects by their labels; every requirement must hold."""

    match_labels: Labels = Field(default_factory=dict, alias="matchLabels")
    match_expressions: tuple[LabelRequirement, ...] = Field(
        (), alias="matchExpressions", max_length=16
    )


class AllowedNamespaces(Model):
    """Cluster namespaces that may hold entities of the bus."""

    source: Literal["Same", "All", "Selector"] = Field("Same", alias="from")
    selector: LabelSelector | None = None

    @model_validator(mode="after")
    def _selector_belongs_to_its_word(self) -> AllowedNamespaces:
        if (self.selector is not None) != (self.source == "Selector"):
            raise ValueError("set selector together with from: Selector, and only then")
        return self


# --- where messages are stored ------------------------------------------------------------------


class ResourceAmounts(Model):
    """Amounts of what a container uses."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    ephemeral_storage: Quantity | None = Field(None, alias="ephemeral-storage")


class Resources(Model):
    """Requests and limits of a container, as in Kubernetes."""

    requests: ResourceAmounts = ResourceAmounts()
    limits: ResourceAmounts = ResourceAmounts()


SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


class PostgresStore(Model):
    """A database that is not run by the operator. `caSecretRef` holds the authority of its
    certificate.
    """

    secret_ref: DsnReference = Field(alias="secretRef")
    ca_secret_ref: CaReference | None = Field(None, alias="caSecretRef")
    ssl_mode: SslMode | None = Field(None, alias="sslMode")
    """libpq's modes; None: that of the address."""


class ManagedStore(Model):
    """A database that the operator runs, with one volume. The size may grow, never shrink."""

    size: QuantityText = "10Gi"
    storage_class_name: DnsName | None = Field(None, alias="storageClassName")
    version: Literal["15"] = "15"
    """Major version of Postgres."""

    resources: Resources = Resources()


class Store(Model):
    """A database of the bus; `name`, number and order of stores are fixed for life."""

    name: StoreName
    postgres: PostgresStore | None = None
    managed: ManagedStore | None = None

    @model_validator(mode="after")
    def _is_of_one_sort(self) -> Store:
        if (self.postgres is None) == (self.managed is None):
            raise ValueError("set either postgres or managed")
        return self


def _unique_store_names(stores: tuple[Store, ...]) -> tuple[Store, ...]:
    if len({store.name for store in stores}) < len(stores):
        raise ValueError("give each store a name of its own")
    return stores


class Storage(Model):
    """The databases of the bus, one to the number of its partitions."""

    stores: Annotated[
        tuple[Store, ...],
        Field(min_length=1, max_length=MAX_PARTITIONS),
        AfterValidator(_unique_store_names),
    ] = (Store(name="main", managed=ManagedStore()),)


# --- pods, services, certificates ---------------------------------------------------------------


class Toleration(Model):
    """As in a pod of Kubernetes."""

    key: str | None = Field(None, max_length=317)
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = Field(None, max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = Field(None, alias="tolerationSeconds")


class EnvironmentSource(Model):
    """A key of a Secret or ConfigMap; exactly one is set."""

    secret_key_ref: SecretReference | None = Field(None, alias="secretKeyRef")
    config_map_key_ref: SecretReference | None = Field(None, alias="configMapKeyRef")

    @model_validator(mode="after")
    def _is_of_one_sort(self) -> EnvironmentSource:
        if (self.secret_key_ref is None) == (self.config_map_key_ref is None):
            raise ValueError("set either secretKeyRef or configMapKeyRef")
        return self


class EnvironmentVariable(Model):
    """An environment variable of the broker's container."""

    name: str = Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    value: str | None = Field(None, max_length=4_096)
    value_from: EnvironmentSource | None = Field(None, alias="valueFrom")

    @model_validator(mode="after")
    def _has_one_value(self) -> EnvironmentVariable:
        if self.value is not None and self.value_from is not None:
            raise ValueError("set either value or valueFrom")
        return self


class PodTemplate(Model):
    """The part of the brokers' pods that users may set.

    `affinity` and `topologySpreadConstraints` are checked by Kubernetes when the pods are made.
    """

    labels: Labels = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)
    node_selector: Labels = Field(default_factory=dict, alias="nodeSelector")
    tolerations: tuple[Toleration, ...] = Field((), max_length=32)
    affinity: dict[str, Any] | None = None
    topology_spread_constraints: tuple[dict[str, Any], ...] = Field(
        (), alias="topologySpreadConstraints", max_length=8
    )
    priority_class_name: DnsName | None = Field(None, alias="priorityClassName")
    env: tuple[EnvironmentVariable, ...] = Field((), max_length=64)


class Service(Model):
    """The Service that clients connect to. `names` are further host names of its certificate."""

    type: Literal["ClusterIP", "LoadBalancer", "NodePort"] = "ClusterIP"
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64)
    load_balancer_class: str | None = Field(
        None, alias="loadBalancerClass", min_length=1, max_length=317
    )
    names: tuple[DnsName, ...] = Field((), max_length=32)

    @model_validator(mode="after")
    def _class_needs_a_load_balancer(self) -> Service:
        if self.load_balancer_class is not None and self.type != "LoadBalancer":
            raise ValueError("loadBalancerClass needs type: LoadBalancer")
        return self


class IssuerReference(Model):
    """An issuer of cert-manager."""

    name: DnsName
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    group: DnsName = "cert-manager.io"


class Tls(Model):
    """The certificate of the bus: yours, cert-manager's, or (neither set) the bus's own."""

    secret_name: DnsName | None = Field(None, alias="secretName")
    issuer_ref: IssuerReference | None = Field(None, alias="issuerRef")

    @model_validator(mode="after")
    def _has_one_source(self) -> Tls:
        if self.secret_name is not None and self.issuer_ref is not None:
            raise ValueError("set either secretName or issuerRef")
        return self


class NetworkPolicy(Model):
    """Restriction by the operator of connections to pods of the bus."""

    enabled: bool = True


class PodDisruptionBudget(Model):
    """Maximum number of brokers that may be unavailable at once while nodes are drained."""

    max_unavailable: CountOrPercent = Field(1, alias="maxUnavailable")


class UpgradeStrategy(Model):
    """Replacement of brokers. OnDelete: a broker is replaced when its pod is deleted."""

    type: Literal["RollingUpdate", "OnDelete"] = "RollingUpdate"
    max_unavailable: CountOrPercent = Field(1, alias="maxUnavailable")


# --- what is written for applications -----------------------------------------------------------


class ExportedSecrets(Model):
    """Secrets that the operator writes, and their keys."""

    endpoint: SecretReference | None = None
    primary_key: SecretReference | None = Field(None, alias="primaryKey")
    secondary_key: SecretReference | None = Field(None, alias="secondaryKey")
    primary_connection_string: SecretReference | None = Field(None, alias="primaryConnectionString")
    secondary_connection_string: SecretReference | None = Field(
        None, alias="secondaryConnectionString"
    )


# --- operatorSpec of each kind ------------------------------------------------------------------


class ResourceOperatorSpec(Model):
    """Fields that all kinds have."""

    deletion_policy: DeletionPolicy = Field("DeleteIfEmpty", alias="deletionPolicy")
    deletion_protection: bool = Field(False, alias="deletionProtection")
    reconcile_policy: ReconcilePolicy = Field("Manage", alias="reconcilePolicy")
    secrets: ExportedSecrets | None = None


class NamespaceOperatorSpec(ResourceOperatorSpec):
    """`operatorSpec` of a Namespace."""

    allowed_namespaces: AllowedNamespaces = Field(AllowedNamespaces(), alias="allowedNamespaces")
    soft_delete: SoftDelete = Field(SoftDelete(), alias="softDelete")
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    brokers: int = Field(1, ge=1, le=MAX_PARTITIONS)
    resources: Resources = Resources()
    storage: Storage = Storage()
    pod_template: PodTemplate = Field(PodTemplate(), alias="podTemplate")
    service: Service = Service()
    tls: Tls = Tls()
    network_policy: NetworkPolicy = Field(NetworkPolicy(), alias="networkPolicy")
    pod_disruption_budget: PodDisruptionBudget = Field(
        PodDisruptionBudget(), alias="podDisruptionBudget"
    )
    upgrade_strategy: UpgradeStrategy = Field(UpgradeStrategy(), alias="upgradeStrategy")


class EntityOperatorSpec(ResourceOperatorSpec):
    """`operatorSpec` of a Queue, Topic or Subscription.

    `onAutoDelete` None: DeleteResource, or KeepResource where a GitOps tool owns the resource.
    """

    on_auto_delete: Literal["KeepResource", "Recreate", "DeleteResource"] | None = Field(
        None, alias="onAutoDelete"
    )
    adopt: Literal["IfMatching", "Always", "Never"] = "IfMatching"


class History(Model):
    """Retention of settled messages; without it none are kept."""

    retention_ms: Retention | None = Field(None, alias="retention")


class StoredOperatorSpec(EntityOperatorSpec):
    """`operatorSpec` of a Queue or Subscription, which store messages."""

    history: History = Field(History())


class TopicOperatorSpec(EntityOperatorSpec):
    """`operatorSpec` of a Topic."""

    history: None = None

    @field_validator("history", mode="before")
    @classmethod
    def _refuse_history(cls, value: object) -> None:
        if value is not None:
            raise ValueError("a topic stores no messages: give its subscriptions a history")
