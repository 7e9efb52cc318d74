"""Files for GitOps tools: health by Argo CD's script, by kstatus and by Flux agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import cel
import pytest
import yaml
from lupa.lua51 import LuaRuntime

from postbus_operator.crds import KINDS
from tests.dev_bus import ROOT

GITOPS: Final = ROOT / "docs" / "gitops"
HEALTH: Final = GITOPS / "argocd" / "resource_customizations" / "postbus.dev" / "_"
SCRIPT: Final = (HEALTH / "health.lua").read_text(encoding="utf-8")
CASES: Final = yaml.safe_load((HEALTH / "health_test.yaml").read_text(encoding="utf-8"))["tests"]
FLUX: Final = list(
    yaml.safe_load_all((GITOPS / "flux" / "kustomizations.yaml").read_text(encoding="utf-8"))
)
EXPRESSIONS: Final = {each["kind"]: each for each in FLUX[-1]["spec"]["healthCheckExprs"]}

Object = dict[str, Any]


def argo_health(found: Object) -> tuple[str, str]:
    """Return status and message of an object; the script has Lua's basic functions only."""
    lua = LuaRuntime()
    for library in ("io", "os", "package", "debug", "require", "dofile", "loadfile", "python"):
        lua.globals()[library] = None
    lua.globals().obj = lua.table_from(found, recursive=True)
    answer = lua.execute(SCRIPT)
    return answer["status"], answer["message"]


def kstatus(found: Object) -> str:
    """Return the status by the rules of kstatus, which Flux and `kubectl` plugins use."""
    if "deletionTimestamp" in found["metadata"]:
        return "Terminating"
    status = found.get("status", {})
    if (
        status.get("observedGeneration", found["metadata"]["generation"])
        != (found["metadata"]["generation"])
    ):
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
            if cel.evaluate(EXPRESSIONS[found["kind"]][name], variables):
                return name
        except RuntimeError:
            return "inProgress"
    return "inProgress"


def object_of(case: Object) -> Object:
    found: Object = yaml.safe_load((HEALTH / case["inputPath"]).read_text(encoding="utf-8"))
    return found


@pytest.fixture(params=CASES, ids=lambda case: Path(case["inputPath"]).stem)
def case(request: pytest.FixtureRequest) -> Object:
    found: Object = request.param
    return found


def test_the_script_gives_the_health_of_each_state(case: Object) -> None:
    wanted = case["healthStatus"]
    assert argo_health(object_of(case)) == (wanted["status"], wanted["message"])


AGREEING: Final = {
    # Argo CD's word -> kstatus's, Flux's with the expressions
    "Healthy": {("Current", "current")},
    "Progressing": {("InProgress", "inProgress"), ("Terminating", "current")},
    "Suspended": {("InProgress", "current")},
    # Without Stalled kstatus goes on waiting: another resource may change it.
    "Degraded": {("Failed", "failed"), ("InProgress", "inProgress"), ("Terminating", "current")},
}


def test_kstatus_and_flux_agree_with_the_script(case: Object) -> None:
    found = object_of(case)
    said = kstatus(found), flux_health(found)
    if "status" not in found:
        # kstatus takes a new object for finished, whoever made it: the expressions do not.
        assert said == ("Current", "inProgress")
    else:
        assert said in AGREEING[case["healthStatus"]["status"]]


def test_every_kind_has_states_and_expressions() -> None:
    kinds = {kind.name for kind in KINDS}
    assert {object_of(case)["kind"] for case in CASES} == kinds == set(EXPRESSIONS)
    assert {Path(case["inputPath"]).name for case in CASES} == {
        path.name for path in (HEALTH / "testdata").iterdir()
    }


def test_states_are_objects_that_the_api_server_could_have(case: Object) -> None:
    found = object_of(case)
    kind = next(kind for kind in KINDS if kind.name == found["kind"])
    kind.spec.model_validate(found["spec"])
    kind.status.model_validate(found.get("status", {}))


def test_the_config_map_has_the_script() -> None:
    found = yaml.safe_load((GITOPS / "argocd" / "argocd-cm.yaml").read_text(encoding="utf-8"))
    customizations = yaml.safe_load(found["data"]["resource.customizations"])
    assert customizations == {"postbus.dev/*": {"health.lua": SCRIPT}}
