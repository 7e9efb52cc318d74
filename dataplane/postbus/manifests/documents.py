"""Kinds of documents that manifests may hold: the resources, and the Secrets that they name."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from postbus.contract.entities import Model
from postbus.contract.resources import (
    API_VERSION,
    Metadata,
    NamespaceDocument,
    QueueDocument,
    SubscriptionDocument,
    TopicDocument,
)


class SecretDocument(Model):
    """A document of kind Secret: `stringData` overrides `data`, as in Kubernetes."""

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
