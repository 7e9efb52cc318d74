"""kopf only watches: rules about the few lines that use it."""

from __future__ import annotations

import ast
from pathlib import Path

import kopf
import pytest

from postbus_operator.annotations import FINALIZER
from postbus_operator.crds import KINDS
from postbus_operator.handlers import registry
from postbus_operator.kube.kopf_settings import kopf_settings
from postbus_operator.kube.resource_types import CHILDREN, CLUSTER_NAMESPACES

PACKAGE = Path(__file__).resolve().parents[2] / "operator" / "postbus_operator"
HANDLERS = PACKAGE / "handlers.py"
MAX_LINES = 5

USED = {
    "kopf.AiohttpSession", "kopf.Body", "kopf.DiffBaseStorage", "kopf.OperatorRegistry",
    "kopf.OperatorSettings", "kopf.Patch", "kopf.ProgressStorage", "kopf.RawEvent", "kopf.on",
    "kopf.on.event", "kopf.on.login", "kopf.run_tasks", "kopf.spawn_tasks",
}  # fmt: skip
"""All of kopf that the operator uses: no timers, daemons, indexes, nor handlers of differences."""


def uses_of_kopf(tree: ast.Module) -> set[str]:
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("kopf.")
    }


def test_nothing_of_kopf_is_used_but_its_watches() -> None:
    used = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= uses_of_kopf(tree)
        imported = {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kopf")
        }
        assert imported == set(), path
    assert used == USED


def test_handlers_are_short() -> None:
    for node in ast.walk(ast.parse(HANDLERS.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            code = [each for each in node.body if not isinstance(each, ast.Expr | ast.Constant)]
            lines = sum((each.end_lineno or 0) - each.lineno + 1 for each in code)
            assert lines <= MAX_LINES, node.name


def test_selectors_have_a_group_a_version_and_a_plural() -> None:
    for node in ast.walk(ast.parse(HANDLERS.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kopf.on.event":
            assert [ast.unparse(each) for each in node.args] == [
                "type.group",
                "type.version",
                "type.plural",
            ]


@pytest.mark.parametrize("is_cluster_wide", [True, False])
def test_the_watched_types_are_those_of_the_operator(is_cluster_wide: bool) -> None:
    made = registry(is_cluster_wide=is_cluster_wide)
    selectors = made._watching.get_all_selectors()
    expected = {("postbus.dev", "v1alpha1", kind.plural) for kind in KINDS}
    expected |= {(each.group, each.version, each.plural) for each in CHILDREN}
    if is_cluster_wide:
        expected.add(("", "v1", CLUSTER_NAMESPACES.plural))
    assert {(each.group, each.version, each.any_name) for each in selectors} == expected
    for others in (made._indexing, made._changing, made._spawning, made._webhooks):
        assert others.get_all_handlers() == []


def test_kopf_keeps_no_state_on_objects() -> None:
    settings = kopf_settings(is_cluster_wide=True)
    assert settings.persistence.finalizer != FINALIZER
    assert not settings.posting.enabled
    assert settings.peering.standalone
    assert settings.scanning.disabled
    body = kopf.Body({"metadata": {"annotations": {"a": "b"}}, "spec": {}})
    patch = kopf.Patch({}, body=body)
    diffs, progress = settings.persistence.diffbase_storage, settings.persistence.progress_storage
    assert diffs.fetch(body=body) is None
    assert diffs.build(body=body) == {}
    progress.touch(body=body, patch=patch, value="now")
    progress.purge(key="x", body=body, patch=patch)
    assert not patch
    with pytest.raises(NotImplementedError):
        diffs.store(body=body, patch=patch, essence={})
    with pytest.raises(NotImplementedError):
        progress.store(key="x", record={}, body=body, patch=patch)


def test_secrets_and_children_are_selected_by_the_api_server() -> None:
    selectors = kopf_settings(is_cluster_wide=True).watching.label_selectors
    found = {key.any_name: value for key, value in selectors.items()}
    assert found["secrets"] == "postbus.dev/watch=true"
    children = {each.plural for each in CHILDREN} - {"secrets"}
    assert {found[each] for each in children} == {"app.kubernetes.io/managed-by=postbus-operator"}
    assert set(found) == children | {"secrets"}
