"""Pods that the operator makes fit the images: programs, options, folders, user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from postbus_operator.children import store as store_pods
from postbus_operator.children.broker import broker_objects
from store_image import postbus_store
from tests.operator.buses import bus_of

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
BUS = bus_of(
    {
        "sku": {"name": "Standard"},
        "operatorSpec": {"storage": {"stores": [{"name": "a", "managed": {"size": "10Gi"}}]}},
    }
)


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == "StatefulSet")
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


STORE_POD = pod_of(store_pods.store_objects(BUS))
BROKER_POD = pod_of(broker_objects(BUS))


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


def test_store_gets_options_that_it_knows() -> None:
    program, *options = container(STORE_POD)["args"]
    assert f"/usr/local/bin/{program} " in DOCKERFILE
    assert postbus_store.parse(options).max_connections > 36


def test_volume_and_secrets_are_where_the_store_looks_for_them() -> None:
    mounts = {each["mountPath"]: each for each in container(STORE_POD)["volumeMounts"]}
    options = postbus_store.parse(["--max-connections", "1"])
    written = {str(options.volume), str(options.socket_folder), "/tmp"}
    read = {str(options.tls_folder), str(options.auth_folder)}
    assert mounts.keys() == written | read
    assert {path for path, each in mounts.items() if not each.get("readOnly")} == written
    server = postbus_store.Server(options)
    assert server.password_file.name == store_pods.PASSWORD_FILE
    assert {store_pods.USER, store_pods.DATABASE} == {postbus_store.USER}


def test_probes_of_the_store_run_its_own_program() -> None:
    ready = ROOT / "operator" / "store_image" / "postbus-store-ready"
    for probe in ("startupProbe", "readinessProbe"):
        (command,) = container(STORE_POD)[probe]["exec"]["command"]
        assert command == ready.name
        assert f"/usr/local/bin/{command}" in DOCKERFILE
    assert ready.stat().st_mode & 0o111


@pytest.mark.parametrize("pod", [STORE_POD, BROKER_POD], ids=["store", "broker"])
def test_pods_run_as_the_user_of_the_images(pod: dict[str, Any]) -> None:
    (user,) = set(re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE))
    rights = pod["securityContext"]
    assert {rights["runAsUser"], rights["runAsGroup"], rights["fsGroup"]} == {int(user)}


def test_what_a_broker_writes_is_mounted() -> None:
    found = container(BROKER_POD)
    mounts = {each["mountPath"]: each for each in found["volumeMounts"]}
    written = {path for path, each in mounts.items() if not each.get("readOnly")}
    home = re.search(r"^WORKDIR (/var/lib/postbus)$", DOCKERFILE, re.MULTILINE)
    assert home is not None
    assert written == {home[1], "/tmp"}
    (data,) = (each["value"] for each in found["env"] if each["name"] == "POSTBUS_DATA")
    assert f"POSTBUS_DATA={data}\n" in DOCKERFILE
