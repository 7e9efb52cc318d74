"""Health of custom resources as tools see it: kstatus, Argo CD's script, Flux's expressions."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import cel
import yaml
from lupa.lua51 import LuaRuntime

from postbus_operator.conditions import ABNORMAL
from tests.dev_bus import ROOT

GITOPS: Final = ROOT / "docs" / "gitops"
HEALTH: Final = GITOPS / "argocd" / "resource_customizations" / "postbus.dev" / "_"

WAITING: Final = frozenset({"OwnedByOther", "Paused", "AutoDeletedOnIdle", "Provisioning"})
"""Reasons of a Ready that is not True without Reconciling and Stalled: somebody else acts first."""

Object = dict[str, Any]


@cache
def script() -> str:
    return (HEALTH / "health.lua").read_text(encoding="utf-8")


@cache
def expressions() -> dict[str, dict[str, str]]:
    """Return the expressions of Flux by kind."""
    text = (GITOPS / "flux" / "kustomizations.yaml").read_text(encoding="utf-8")
    shop = list(yaml.safe_load_all(text))[-1]
    return {each["kind"]: each for each in shop["spec"]["healthCheckExprs"]}


def argo_health(found: Object) -> tuple[str, str]:
    """Return status and message of an object; the script has Lua's basic functions only."""
    lua = LuaRuntime()
    for library in ("io", "os", "package", "debug", "require", "dofile", "loadfile", "python"):
        lua.globals()[library] = None
    lua.globals().obj = lua.table_from(found, recursive=True)
    answer = lua.execute(script())
    return answer["status"], answer["message"]


def kstatus(found: Object) -> str:
    """Return the status by the rules of kstatus, which Flux uses."""
    generation = found["metadata"]["generation"]
    if "deletionTimestamp" in found["metadata"]:
        return "Terminating"
    status = found.get("status", {})
    if status.get("observedGeneration", generation) != generation:
        return "InProgress"
    conditions = status.get("conditions", ())
    for each in conditions:
        if each["status"] == "True" and each["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if each["type"] == "Reconciling" else "Failed"
    ready = next((each["status"] for each in conditions if each["type"] == "Ready"), "True")
    return "Current" if ready == "True" else "InProgress"


def flux_health(found: Object) -> str:
    """Return the status by the expressions of the example; Flux waits while they fail."""
    variables = {name: found[name] for name in ("metadata", "spec", "status") if name in found}
    for name in ("inProgress", "failed", "current"):
        try:
            if cel.evaluate(expressions()[found["kind"]][name], variables):
                return name
        except RuntimeError:
            return "inProgress"
    return "inProgress"


AGREEING: Final = {
    # Argo CD's word -> kstatus's, Flux's with the expressions
    "Healthy": {("Current", "current")},
    "Progressing": {("InProgress", "inProgress"), ("Terminating", "current")},
    "Suspended": {("InProgress", "current"), ("Current", "current")},
    # Without Stalled kstatus goes on waiting: another resource may change it.
    "Degraded": {("Failed", "failed"), ("InProgress", "inProgress")},
}


def check_health(found: Object) -> None:
    """Check that every tool understands a status that the operator has written, in the same way."""
    conditions = {each["type"]: each for each in found["status"]["conditions"]}
    assert len(conditions) == len(found["status"]["conditions"])
    assert "Ready" in conditions, conditions
    assert all(conditions[each]["status"] == "True" for each in ABNORMAL & conditions.keys())
    assert not {"Reconciling", "Stalled"} <= conditions.keys(), conditions
    status, message = argo_health(found)
    if "deletionTimestamp" in found["metadata"]:
        assert (status == "Degraded") == ("DeletionBlocked" in conditions)
        return
    assert (kstatus(found), flux_health(found)) in AGREEING[status], conditions
    if status == "Degraded" and "Stalled" not in conditions:
        assert conditions["Ready"]["reason"] in WAITING, conditions
    assert message, conditions
