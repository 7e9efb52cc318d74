"""The guide to operators of others: its commands on a server with their definitions, its files
decoded with their Go types, and what a bus makes of the Secrets that these operators write.

The definitions and types are those of the modules that `foreign_types/go.mod` names.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from postbus_operator.certificates import leaf_data, new_authority
from postbus_operator.crds import GROUP
from postbus_operator.keys.contents import secret_name
from postbus_operator.kube.resource_types import CERTIFICATES, STATEFUL_SETS
from postbus_operator.objects import Key
from tests.kube.api_server import BIN, ROOT, ApiServer, api_server, missing_programs
from tests.kube.bus_rig import Rig, rig_on
from tests.kube.conftest import install_definitions
from tests.kube.guides import blocks, languages, run
from tests.kube.helm import Object, rendered

PAGE: Final = "kubernetes-integrations.md"
FILES: Final = ROOT / "docs" / "integrations"
FLUX: Final = ROOT / "docs" / "gitops" / "flux" / "kustomizations.yaml"
DEFINITIONS: Final = BIN.parent / "foreign-definitions"
PROGRAM: Final = BIN / "foreign-types"
MONITORING: Final = {
    name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule")
}
AUTHORITY: Final = "authority of the bus"


def documents(name: str) -> dict[str, Object]:
    """Return the objects of a file by kind; the last one of each."""
    text = (FILES / name).read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def decode(*manifests: Object) -> subprocess.CompletedProcess[str]:
    """Decode manifests with the Go types of their operators."""
    text = yaml.safe_dump_all(manifests)
    return subprocess.run([PROGRAM], input=text, capture_output=True, text=True, check=False)


def foreign() -> Iterator[Object]:
    """Yield every object for other operators in documents and chart."""
    for path in (*sorted(FILES.glob("*.yaml")), FLUX):
        for each in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if not each.get("apiVersion", GROUP).startswith(GROUP):
                yield each
    for each in rendered(MONITORING):
        if each["apiVersion"].startswith("monitoring."):
            yield each


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """A server of its own: others must not see cert-manager."""
    missing = missing_programs()
    if missing or not PROGRAM.exists():
        pytest.fail(f"{', '.join(missing) or PROGRAM.name}: not built yet; run make kube-tools")
    with api_server() as running:
        install_definitions(running)
        run(running, f"kubectl create --filename={DEFINITIONS}")
        run(running, "kubectl wait crd --all --for=condition=Established --timeout=60s")
        yield running


@pytest.fixture
def spaces(server: ApiServer) -> None:
    """What the guide begins with: a queue's Secret, and an operator of KEDA."""
    run(server, "kubectl create namespace shop && kubectl create namespace keda")
    secret = secret_name(Key("Queue", "shop", "orders"), "scaler")
    data = f"--from-literal=ca.crt='{AUTHORITY}'"
    run(server, f"kubectl --namespace shop create secret generic {secret} {data}")
    image = "--image=example.org/keda-operator"
    run(server, f"kubectl --namespace keda create deployment keda-operator {image}")


@pytest.mark.usefixtures("spaces")
def test_the_guide_works_as_written(server: ApiServer) -> None:
    assert languages(PAGE) == {"sh"}
    keda, authority, prometheus, postgres, certificates = blocks(PAGE, "sh")
    run(server, keda)
    run(server, authority)
    said = run(
        server,
        "kubectl --namespace keda get secret bus-authorities"
        " --output=go-template='{{index .data \"shop-bus.crt\" | base64decode}}'",
    )
    assert said == AUTHORITY
    keda_operator = "kubectl --namespace keda get deployment keda-operator --output=yaml"
    pod = yaml.safe_load(run(server, keda_operator))["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["volumeMounts"][0]["mountPath"] == "/custom/ca"
    assert pod["volumes"][0]["secret"]["secretName"] == "bus-authorities"
    # The other trigger takes the place of the first one.
    run(server, prometheus)
    run(server, postgres)
    run(server, "kubectl --namespace shop delete sbns/shop-bus")
    run(server, certificates)
    triggers = "--output=jsonpath='{.spec.triggers[*].type}'"
    shown = run(server, f"kubectl --namespace shop get scaledobject orders-receiver {triggers}")
    assert shown == "prometheus"


def test_the_scaler_finds_the_queue_and_a_key_that_may_count() -> None:
    found = documents("keda.yaml")
    queue, scaled = found["Queue"], found["ScaledObject"]
    [reference] = found["TriggerAuthentication"]["spec"]["secretTargetRef"]
    [trigger] = scaled["spec"]["triggers"]
    key = Key("Queue", queue["metadata"]["namespace"], queue["metadata"]["name"])
    managing = [
        rule["name"] for rule in queue["spec"]["authorizationRules"] if "Manage" in rule["rights"]
    ]
    assert [secret_name(key, rule) for rule in managing] == [reference["name"]]
    assert trigger["authenticationRef"] == {
        "name": found["TriggerAuthentication"]["metadata"]["name"]
    }
    assert trigger["metadata"]["queueName"] == key.name
    assert len({each["metadata"]["namespace"] for each in found.values()}) == 1


# --- the types of other operators ---------------------------------------------------------------


def test_manifests_for_other_operators_are_of_their_types() -> None:
    manifests = list(foreign())
    done = decode(*manifests)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{each['kind']} {each['metadata']['name']}" for each in manifests
    ]
    assert {each["kind"] for each in manifests} >= {
        "Certificate", "Cluster", "HelmRelease", "Issuer", "Kustomization", "PodMonitor",
        "PrometheusRule", "ScaledObject", "ServiceMonitor", "TriggerAuthentication",
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted({"Cluster", "Issuer", "PodMonitor", "ScaledObject"}))
def test_a_field_that_a_type_does_not_have_is_refused(kind: str) -> None:
    manifest = next(each for each in foreign() if each["kind"] == kind)
    field = next(iter(manifest["spec"]))
    for name in ("unknown", field.swapcase()):
        done = decode({**manifest, "spec": {**manifest["spec"], name: manifest["spec"][field]}})
        assert f'unknown field "spec.{name}"' in done.stderr
        assert done.returncode == 1


# --- what a bus makes of their Secrets ----------------------------------------------------------


@pytest.fixture
async def rig(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    async with rig_on(server, monkeypatch) as made:
        yield made


async def test_a_bus_uses_the_certificate_that_cert_manager_issues(rig: Rig) -> None:
    bus = documents("cert-manager.yaml")["Namespace"]
    await rig.put(bus["spec"])
    await rig.look()
    assert "cert-manager has not issued Secret" in str(rig.condition("SecretsSynced"))
    certificate = await rig.get(CERTIFICATES, "shop-bus-tls")
    assert certificate is not None
    # The server drops what the definition does not have.
    assert set(certificate["spec"]) == {
        "secretName", "secretTemplate", "issuerRef", "dnsNames", "privateKey", "usages",
    }  # fmt: skip
    assert decode(certificate).stderr == ""
    issuer = bus["spec"]["operatorSpec"]["tls"]["issuerRef"]
    assert certificate["spec"]["issuerRef"] == issuer
    names = certificate["spec"]["dnsNames"]
    assert {f"shop-bus.{rig.namespace}.svc", "bus.example.org"} <= set(names)
    authority = new_authority("cert-manager", rig.now)
    issued = leaf_data(authority, names, rig.now, None)
    await rig.put_secret(
        certificate["spec"]["secretName"],
        tls_crt=issued["tls.crt"],
        tls_key=issued["tls.key"],
        ca_crt=authority.bundle,
    )
    await rig.look()
    served = await rig.data_of("shop-bus-tls")
    assert (served["tls.crt"], served["ca.crt"]) == (issued["tls.crt"], authority.bundle)
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is not None


async def test_a_bus_uses_the_address_that_cloudnative_pg_writes(rig: Rig) -> None:
    found = documents("cloudnative-pg.yaml")
    await rig.put(found["Namespace"]["spec"])
    await rig.look()
    cluster = found["Cluster"]["metadata"]["name"]
    assert f"Secret {cluster}-app is missing" in str(rig.condition("SecretsSynced"))
    made = found["Cluster"]["spec"]["bootstrap"]["initdb"]
    account = f"{made['owner']}:secret"
    address = f"postgresql://{account}@{cluster}-rw.{rig.namespace}:5432/{made['database']}"
    await rig.put_secret(f"{cluster}-app", uri=address.encode())
    await rig.look()
    assert f"Secret {cluster}-ca is missing" in str(rig.condition("SecretsSynced"))
    authority = new_authority("cloudnative-pg", rig.now)
    await rig.put_secret(f"{cluster}-ca", ca_crt=authority.bundle)
    await rig.look()
    stores = await rig.data_of("shop-bus-stores")
    _, line = stores["stores"].decode().splitlines()
    assert line.startswith(f"{address}?")
    assert line.endswith("sslmode=verify-full")
    assert await rig.get(STATEFUL_SETS, "shop-bus-broker") is not None
