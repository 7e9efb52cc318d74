"""Settings of the operator, read once from `POSTBUS_OPERATOR_…` variables and passed on."""

from __future__ import annotations

import difflib
import os
import socket
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

import postbus

PREFIX: Final = "POSTBUS_OPERATOR_"
OWN_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class SettingsError(Exception):
    """The settings cannot be used."""


class Settings(BaseSettings):
    """All settings of an operator process."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Namespaces of the cluster to serve, separated by commas. Default: all of them, which needs
    rights in the whole cluster."""

    image: str = f"postbus:{postbus.__version__}"
    """Image of the brokers, for a Namespace that names none. Default: that of this version."""

    store_image: str = f"postbus-store:{postbus.__version__}"
    """Image of managed stores. Default: that of this version."""

    pipeline_image: str = f"postbus-pipeline:{postbus.__version__}"
    """Image of pipelines, for a Pipeline that names none. Default: that of this version."""

    driver_role: str = Field(
        "ClusterRole/postbus-operator-driver", pattern=r"^(ClusterRole|Role)/[a-z0-9.-]+$"
    )
    """Kind and name of the role with which drivers of pipelines make executors. Default:
    ClusterRole/postbus-operator-driver."""

    image_pull_policy: Literal["IfNotPresent", "Never"] = "IfNotPresent"
    """Whether nodes may pull these images. Default: those that a node lacks."""

    cluster_domain: str = "cluster.local"
    """Domain of the names of Services. Default: that of Kubernetes."""

    workers: int = Field(32, ge=1, le=1_000)
    """Resources that are reconciled at the same time. Default: 32."""

    resync_s: float = Field(300, ge=1)
    """Seconds in which each resource is looked at once, without any event. Default: 300."""

    rotation_s: float = Field(300, ge=0)
    """Seconds between the two steps of a rotation of keys: applications read their Secrets again
    before the former key ends. A kubelet updates mounted Secrets within two minutes. Default:
    300."""

    watch_silence_s: float = Field(180, ge=1)
    """Seconds without an event, a bookmark or a new connection after which a watch counts as broken
    and `/healthz` fails. A watch that hears nothing connects again after 70 s. Default: 180."""

    lease_name: str = Field("postbus-operator", min_length=1, max_length=253)
    """Name of the Lease that elects the leader among the operator's replicas. Default:
    postbus-operator."""

    lease_namespace: str = ""
    """Namespace of the Lease. Default: the operator's own."""

    lease_duration_s: int = Field(15, ge=1)
    """Seconds without a renewal after which another replica takes the Lease. Default: 15."""

    renew_deadline_s: float = Field(10, gt=0)
    """Seconds without a successful renewal after which the leader stops and exits. Default: 10."""

    retry_period_s: float = Field(2, gt=0)
    """Seconds between renewals, and between attempts to take the Lease. Default: 2."""

    identity: str = Field(default_factory=socket.gethostname, min_length=1, max_length=200)
    """Name of this process in the Lease; a random part is added. Default: the host's name, which is
    the pod's."""

    http_host: str = "0.0.0.0"
    """Address of `/healthz`, `/readyz` and `/metrics`. Default: every IPv4 interface."""

    http_port: int = Field(8080, ge=0, le=65_535)
    """Their port; 0 takes any free one. Default: 8080."""

    log_format: Literal["human", "json"] = "json"
    """Format of the log on standard error. Default: json."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the log. Default: info."""

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(each.strip() for each in value.split(",") if each.strip())
        return value

    @model_validator(mode="after")
    def _periods_follow_each_other(self) -> Settings:
        if not self.retry_period_s < self.renew_deadline_s < self.lease_duration_s:
            raise ValueError(
                "retry_period_s must be below renew_deadline_s, and that below lease_duration_s"
            )
        return self

    @property
    def own_namespace(self) -> str:
        """The namespace of the Lease: the one set, that of the pod, or `default`."""
        if self.lease_namespace:
            return self.lease_namespace
        try:
            return OWN_NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        except OSError:
            return "default"


def load_settings() -> Settings:
    """Return the settings of the environment. Raises SettingsError."""
    names = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in names)
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise SettingsError(f"{unknown[0]} is no setting{hint}")
    try:
        return Settings()
    except ValidationError as error:
        problems = (
            f"{PREFIX}{str(problem['loc'][0]).upper()}: {problem['msg']}"
            if problem["loc"]
            else problem["msg"]
            for problem in error.errors()
        )
        raise SettingsError("; ".join(problems)) from None
