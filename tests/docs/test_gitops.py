"""Files for GitOps tools: health by Argo CD's script, by kstatus and by Flux agree."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import yaml

from postbus_operator.crds import KINDS
from tests.operator.health import (
    AGREEING,
    GITOPS,
    HEALTH,
    Object,
    argo_health,
    expressions,
    flux_health,
    kstatus,
    script,
)

CASES: Final = yaml.safe_load((HEALTH / "health_test.yaml").read_text(encoding="utf-8"))["tests"]


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


def test_kstatus_and_flux_agree_with_the_script(case: Object) -> None:
    found = object_of(case)
    said = kstatus(found), flux_health(found)
    if "status" not in found:
        # kstatus takes a new object for finished, whoever made it: the expressions do not.
        assert said == ("Current", "inProgress")
    elif "deletionTimestamp" in found["metadata"]:
        assert said[0] == "Terminating"
    else:
        assert said in AGREEING[case["healthStatus"]["status"]]


def test_every_kind_has_states_and_expressions() -> None:
    kinds = {kind.name for kind in KINDS}
    assert {object_of(case)["kind"] for case in CASES} == kinds == set(expressions())
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
    assert customizations == {"postbus.dev/*": {"health.lua": script()}}
