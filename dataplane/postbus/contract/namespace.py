"""What a namespace is told to be, as the control API and the store know it; see `entities`."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from postbus.contract.entities import DAY_MS, Model, NamespaceProperties, Retention


class SoftDelete(Model):
    """How long deleted entities are kept that are to be kept, so that they can be restored."""

    retention_ms: Retention = Field(7 * DAY_MS, alias="retention")


class NamespaceDefinition(NamespaceProperties):
    """Everything a `PUT` may say of a namespace.

    What it is for life may be left out. `authorizationRules` are told as the manifest says them;
    rules are changed by their own paths.
    """

    soft_delete: SoftDelete = Field(SoftDelete(), alias="softDelete")


FOR_LIFE: Final = {
    "sku": "sku.name",
    "premium_messaging_partitions": "premiumMessagingPartitions",
    "authorization_rules": "authorizationRules",
}
"""Fields that no `PUT` changes. Of `sku` that is the name."""


def immutable_fields(before: NamespaceDefinition, wanted: NamespaceDefinition) -> list[str]:
    """Return what is said of a namespace and differs, although it cannot be changed."""
    return [
        shown
        for name, shown in FOR_LIFE.items()
        if name in wanted.model_fields_set
        and (
            before.sku.name is not wanted.sku.name
            if name == "sku"
            else getattr(before, name) != getattr(wanted, name)
        )
    ]


def changed(before: NamespaceDefinition, wanted: NamespaceDefinition) -> NamespaceDefinition:
    """Return a definition as it is wanted; what is for life and not said stays."""
    kept = {name: getattr(before, name) for name in FOR_LIFE if name not in wanted.model_fields_set}
    return wanted.model_copy(update=kept)


def in_force(declared: NamespaceDefinition, put: NamespaceDefinition | None) -> NamespaceDefinition:
    """Return what counts after a start: what a manifest says, beside that what was put last."""
    if put is None:
        return declared
    said = declared.model_fields_set | set(FOR_LIFE)
    if "sku" not in declared.model_fields_set and put.sku.name is declared.sku.name:
        said -= {"sku"}  # its capacity was put
    return put.model_copy(update={name: getattr(declared, name) for name in said})
