"""The definition of a namespace, as used by the control API and the store; see `entities`."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from postbus.contract.entities import DAY_MS, Model, NamespaceProperties, Retention


class SoftDelete(Model):
    """Period in which entities deleted with the policy `Retain` can be restored."""

    retention_ms: Retention = Field(7 * DAY_MS, alias="retention")


class NamespaceDefinition(NamespaceProperties):
    """The definition of a namespace in a `PUT`.

    Immutable fields may be left out. `authorizationRules` are those of the manifest; rules are
    changed by paths of their own.
    """

    soft_delete: SoftDelete = Field(SoftDelete(), alias="softDelete")


FOR_LIFE: Final = {
    "sku": "sku.name",
    "premium_messaging_partitions": "premiumMessagingPartitions",
    "authorization_rules": "authorizationRules",
}
"""Immutable fields -> their names for users. Of `sku` only the name is immutable."""


def immutable_fields(before: NamespaceDefinition, wanted: NamespaceDefinition) -> list[str]:
    """Return the immutable fields that the wanted definition would change."""
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
    """Return the wanted definition; immutable fields that it leaves out stay."""
    kept = {name: getattr(before, name) for name in FOR_LIFE if name not in wanted.model_fields_set}
    return wanted.model_copy(update=kept)


def in_force(declared: NamespaceDefinition, put: NamespaceDefinition | None) -> NamespaceDefinition:
    """Return the definition after a start: fields of the manifest, and of the last PUT for the
    rest.
    """
    if put is None:
        return declared
    said = declared.model_fields_set | set(FOR_LIFE)
    if "sku" not in declared.model_fields_set and put.sku.name is declared.sku.name:
        said -= {"sku"}  # its capacity was set by a PUT
    return put.model_copy(update={name: getattr(declared, name) for name in said})
