"""The definition of a namespace, as used by the control API and the store; see `entities`."""

from __future__ import annotations

from typing import Final, NamedTuple

from pydantic import Field

from postbus.contract.entities import (
    DAY_MS,
    Model,
    NamespaceLimits,
    NamespaceProperties,
    Retention,
    Sku,
    SkuProperties,
    limits_of,
)


class SoftDelete(Model):
    """Period in which entities deleted with the policy `Retain` can be restored."""

    retention_ms: Retention = Field(7 * DAY_MS, alias="retention")


class NamespaceDefinition(NamespaceProperties):
    """The definition of a namespace in a `PUT`.

    `sku`, `premiumMessagingPartitions` and `authorizationRules` stay when they are left out. A
    Premium namespace stays Premium, and the number of partitions never changes.
    `authorizationRules` are those of the manifest; rules are changed by paths
    of their own.
    """

    soft_delete: SoftDelete = Field(SoftDelete(), alias="softDelete")


class NamespaceShape(NamedTuple):
    """The tier and the number of partitions of a namespace that exists, as its store has them."""

    sku: Sku
    partition_count: int

    @property
    def limits(self) -> NamespaceLimits:
        """The limits of the namespace."""
        return limits_of(self.sku, self.partition_count)

    def tier_problem(self, wanted: Sku | None) -> str | None:
        """Return the reason against another tier; None: it can change, and the limits with it."""
        if self.sku is not Sku.PREMIUM or wanted in (None, Sku.PREMIUM):
            return None
        return "the namespace is Premium, and a Premium namespace stays Premium"

    def partitions_problem(self, wanted: int | None) -> str | None:
        """Return the reason against a number of partitions; None: it is that of the namespace."""
        if wanted in (None, self.partition_count):
            return None
        count = self.partition_count
        return f"the namespace has {count} partitions, fixed at its creation, not {wanted}"

    def problems(self, wanted: NamespaceProperties) -> list[str]:
        """Return the reasons against a definition with the tier and partitions that it names."""
        found = (
            self.tier_problem(wanted.declared_sku),
            self.partitions_problem(wanted.premium_messaging_partitions),
        )
        return [problem for problem in found if problem is not None]


KEPT: Final = ("sku", "premium_messaging_partitions", "authorization_rules")
"""Fields that a change leaves as they are if it does not name them."""


def change_problems(
    before: NamespaceDefinition, wanted: NamespaceDefinition, shape: NamespaceShape
) -> dict[str, str]:
    """Return the fields that cannot change as wanted, with the reason."""
    elsewhere = "create another namespace and move the messages"
    problems: dict[str, str] = {}
    if (tier := shape.tier_problem(wanted.declared_sku)) is not None:
        problems["sku.name"] = f"{tier}: {elsewhere}"
    count = shape.partitions_problem(wanted.premium_messaging_partitions)
    if count is not None:
        problems["premiumMessagingPartitions"] = f"{count}: leave it out, or {elsewhere}"
    if (
        "authorization_rules" in wanted.model_fields_set
        and before.authorization_rules != wanted.authorization_rules
    ):
        problems["authorizationRules"] = (
            "rules are changed at /v1/authorization-rules, those of a manifest there"
        )
    return problems


def changed(
    before: NamespaceDefinition, wanted: NamespaceDefinition, partition_count: int
) -> NamespaceDefinition:
    """Return the wanted definition; those of `KEPT` that it leaves out stay."""
    left_out = set(KEPT) - wanted.model_fields_set
    if wanted.declared_sku is None:
        left_out.add("sku")
    kept = wanted.model_copy(update={name: getattr(before, name) for name in left_out})
    return _with_partitions(kept, partition_count)


def in_force(
    declared: NamespaceDefinition, put: NamespaceDefinition | None, shape: NamespaceShape
) -> NamespaceDefinition:
    """Return the definition of a namespace: fields of the manifest, else those of the last PUT.

    The tier is that of the store: a manifest that names another one is applied to the store first.
    """
    said = declared.model_fields_set | {"authorization_rules"}
    sources = [each for each in (declared if "sku" in said else None, put) if each is not None]
    skus = [each.sku for each in sources if each.sku.name is shape.sku]
    changes = {name: getattr(declared, name) for name in said}
    changes["sku"] = skus[0] if skus else SkuProperties(name=shape.sku)
    merged = (declared if put is None else put).model_copy(update=changes)
    return _with_partitions(merged, shape.partition_count)


def _with_partitions(definition: NamespaceDefinition, partition_count: int) -> NamespaceDefinition:
    """Return a definition that shows its partitions, if they are a choice of its tier."""
    is_chosen = (
        definition.sku.name is Sku.PREMIUM
        and not limits_of(Sku.PREMIUM, partition_count).is_upgraded
    )
    shown = partition_count if is_chosen else None
    return definition.model_copy(update={"premium_messaging_partitions": shown})
