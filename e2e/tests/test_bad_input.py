"""What only a cluster with nodes shows: images that are not there, volumes that nobody makes, and a
full disk. Nothing is lost, and the bus goes on once it is mended.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest
from e2e.tests.bus import Bus, refusal
from e2e.tests.cluster import IMAGE, LIMIT_S, Space, kubectl, wait_for
from e2e.tests.manifests import queue

NAME: Final = "e2e-bus"
DISK: Final = "/var/lib/postbus-e2e"
DISK_MIB: Final = 400


def message(space: Space, type: str) -> str:
    """Return the message of a condition of the bus."""
    found = space.get(f"sbns/{NAME}")["status"]["conditions"]
    return next(str(each["message"]) for each in found if each["type"] == type)


def test_missing_image_is_shown_and_replaced(space: Space) -> None:
    bus = Bus.make(space, NAME, operator={"image": "postbus:missing"})
    space.apply(queue("orders", NAME))
    space.wait_condition(f"sbns/{NAME}", "PartitionsReady", "False", "PodNotStarting")
    assert "image postbus:missing" in message(space, "PartitionsReady")
    assert "load it" in message(space, "PartitionsReady")
    wait_for(lambda: space.events(NAME), lambda found: "PodNotStarting" in found, LIMIT_S)
    space.patch(f"sbns/{NAME}", {"spec": {"operatorSpec": {"image": None}}})
    bus.wait_ready()
    space.wait_ready("sbq/orders")
    bus.end()


def test_volume_that_nobody_makes_is_shown(space: Space) -> None:
    stores = [{"name": "main", "managed": {"size": "1Gi", "storageClassName": "missing"}}]
    Bus.make(space, NAME, operator={"storage": {"stores": stores}})
    space.wait_condition(f"sbns/{NAME}", "StorageReady", "False", "Unreachable")
    wait_for(lambda: message(space, "StorageReady"), lambda text: "is Pending" in text)
    assert f"kubectl describe pvc data-{NAME}-store-main-0" in message(space, "StorageReady")
    wait_for(lambda: space.events(NAME), lambda found: "Unreachable" in found, LIMIT_S)
    space.delete(f"sbns/{NAME}", limit_s=10.0)


# --- a small disk -------------------------------------------------------------------------------


class SmallDisk:
    """A file system of its own on one node, as a storage class, made by a privileged pod."""

    def __init__(self) -> None:
        self.name = f"disk-{uuid.uuid4().hex[:6]}"
        self.path = f"{DISK}/{self.name}"
        self._space = Space(self.name)

    def make(self) -> None:
        privileged = {"pod-security.kubernetes.io/enforce": "privileged"}
        metadata = {"name": self.name, "labels": privileged}
        self._space.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        mount = f"mkdir -p {self.path} && mount -t tmpfs -o size={DISK_MIB}m disk {self.path}"
        container = {
            "name": "disk", "image": IMAGE, "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-euc", f"{mount} && exec sleep infinity"],
            "securityContext": {"privileged": True, "runAsUser": 0},
            "volumeMounts": [
                {"name": "host", "mountPath": DISK, "mountPropagation": "Bidirectional"}
            ],
        }  # fmt: skip
        host = {"name": "host", "hostPath": {"path": DISK, "type": "DirectoryOrCreate"}}
        self._space.apply({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "disk"},
            "spec": {
                "containers": [container], "volumes": [host], "terminationGracePeriodSeconds": 0,
            },
        })  # fmt: skip
        self._space.wait_ready("pod/disk")
        node = self._space.get("pod/disk")["spec"]["nodeName"]
        self._space.apply(self._storage_class(), self._volume(node))

    def _storage_class(self) -> dict[str, Any]:
        return {
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": self.name},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }  # fmt: skip

    def _volume(self, node: str) -> dict[str, Any]:
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        return {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.name},
            "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain", "storageClassName": self.name,
                "local": {"path": self.path},
                "nodeAffinity": {
                    "required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}
                },
            },
        }  # fmt: skip

    def fill(self) -> None:
        """Use all space."""
        self._run(f"dd if=/dev/zero of={self.path}/filler bs=1M 2>/dev/null || true")

    def free(self) -> None:
        self._run(f"rm {self.path}/filler")

    def end(self) -> None:
        self._run(f"umount -l {self.path} && rmdir {self.path}")
        kubectl("delete", f"pv/{self.name}", f"sc/{self.name}", "--wait=false")
        self._space.close()

    def _run(self, command: str) -> None:
        self._space.kubectl("exec", "disk", "--", "sh", "-euc", command)


@pytest.fixture
def disk(operator: None) -> Iterator[SmallDisk]:
    made = SmallDisk()
    made.make()
    yield made
    made.end()


def test_full_disk_is_shown_and_loses_no_message(space: Space, disk: SmallDisk) -> None:
    stores = [{"name": "main", "managed": {"size": "1Gi", "storageClassName": disk.name}}]
    bus = Bus.make(space, NAME, operator={"storage": {"stores": stores}})
    space.apply(queue("orders", NAME))
    bus.wait_ready()
    space.wait_ready("sbq/orders")
    bus.send("orders", "kept")
    disk.fill()
    refusal(bus, "orders", "x" * 200_000)
    # A bus that was well is looked at within five minutes; each change of its resource is a reason.
    space.kubectl("annotate", f"sbns/{NAME}", "example.test/look=now")
    space.wait_condition(f"sbns/{NAME}", "StorageReady", "False", "StoreFull")
    assert "managed.size" in message(space, "StorageReady")
    space.wait_event(NAME, "StoreFull")
    disk.free()
    bus.wait_ready()
    assert bus.texts("orders", 1) == ["kept"]
    space.delete(f"sbns/{NAME}", limit_s=30.0)
    bus.end()
