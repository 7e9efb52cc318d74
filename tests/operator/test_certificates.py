"""The authority of a bus is renewed without a moment in which a client distrusts a server."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store
from hypothesis import given, settings
from hypothesis import strategies as st

from postbus_operator.bus.control_client import Access, BusControl
from postbus_operator.certificates import (
    AUTHORITY_LIFE,
    AUTHORITY_RENEWAL,
    BUNDLE,
    CERTIFICATE,
    KEY,
    LEAF_LIFE,
    LEAF_RENEWAL,
    NEXT_CERTIFICATE,
    OVERLAP,
    Authority,
    CertificateInvalid,
    checked_pair,
    leaf_data,
    names_of,
    new_authority,
    parse_chain,
    renewed_authority,
    trust_of,
)
from postbus_operator.outcome import BackendUnavailable
from tests.operator.live_bus import leads

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ["shop", "shop.apps.svc", "*.shop-brokers.apps.svc.cluster.local", "10.0.0.7"]


def trusts(bundle: bytes, served: bytes, at: datetime, name: str = "shop.apps.svc") -> bool:
    verifier = (
        PolicyBuilder()
        .store(Store(parse_chain(bundle, BUNDLE)))
        .time(at)
        .build_server_verifier(x509.DNSName(name))
    )
    leaf, *others = parse_chain(served, CERTIFICATE)
    try:
        verifier.verify(leaf, others)
    except x509.verification.VerificationError:
        return False
    return True


def test_a_leaf_is_good_for_each_of_its_names() -> None:
    authority = new_authority("shop", NOON)
    made = leaf_data(authority, NAMES, NOON, None)
    certificate = checked_pair(made, NOON)
    assert names_of(certificate) == NAMES
    pod = "shop-broker-0.shop-brokers.apps.svc.cluster.local"
    assert trusts(made[BUNDLE], made[CERTIFICATE], NOON, pod)
    assert not trusts(made[BUNDLE], made[CERTIFICATE], NOON, "other.apps.svc")


def test_python_loads_what_is_made(tmp_path) -> None:
    made = leaf_data(new_authority("shop" * 60, NOON), NAMES, NOON, None)
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / CERTIFICATE, tmp_path / KEY)
    context.load_verify_locations(tmp_path / BUNDLE)


def test_a_good_leaf_is_kept_to_the_byte() -> None:
    authority = new_authority("shop", NOON)
    made = leaf_data(authority, NAMES, NOON, None)
    late = NOON + LEAF_LIFE - LEAF_RENEWAL - 2 * DAY
    assert leaf_data(authority, list(reversed(NAMES)), late, made) == made
    again = leaf_data(authority, NAMES, late + 2 * DAY, made)
    assert again[CERTIFICATE] != made[CERTIFICATE]


def test_another_name_makes_another_leaf() -> None:
    authority = new_authority("shop", NOON)
    made = leaf_data(authority, NAMES, NOON, None)
    assert leaf_data(authority, [*NAMES, "bus.example.org"], NOON, made) != made


@pytest.mark.parametrize("name", [CERTIFICATE, KEY])
def test_a_damaged_leaf_is_replaced(name: str) -> None:
    authority = new_authority("shop", NOON)
    made = leaf_data(authority, NAMES, NOON, None)
    again = leaf_data(authority, NAMES, NOON, made | {name: b"garbage"})
    assert checked_pair(again, NOON)


def test_an_authority_of_its_prime_stays_as_it_is() -> None:
    authority = new_authority("shop", NOON)
    stored = Authority.from_data(authority.data())
    assert renewed_authority(stored, "shop", NOON + 365 * DAY) == authority


def test_the_next_authority_is_trusted_before_it_signs() -> None:
    authority = new_authority("shop", NOON)
    due = NOON + AUTHORITY_LIFE - AUTHORITY_RENEWAL
    overlapping = renewed_authority(authority, "shop", due)
    assert overlapping.current == authority.current
    assert len(parse_chain(overlapping.bundle, BUNDLE)) == 2
    assert NEXT_CERTIFICATE in overlapping.data()
    assert renewed_authority(overlapping, "shop", due + OVERLAP - DAY) == overlapping
    moved = renewed_authority(overlapping, "shop", due + OVERLAP)
    assert moved.current == overlapping.next
    assert moved.bundle == overlapping.bundle
    ended = renewed_authority(moved, "shop", NOON + AUTHORITY_LIFE + DAY)
    assert parse_chain(ended.bundle, BUNDLE) == [moved.current.parsed]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 29), min_size=1, max_size=60), st.integers(-40, 40))
def test_no_client_of_the_overlap_distrusts_a_server(steps: list[int], offset: int) -> None:
    """Clients have a bundle of up to 30 days ago, servers a leaf of the last look."""
    at = NOON + AUTHORITY_LIFE - AUTHORITY_RENEWAL + offset * DAY
    authority = renewed_authority(new_authority("shop", NOON), "shop", at)
    served = leaf_data(authority, NAMES, at, None)
    former = served[BUNDLE]
    for days in steps:
        at += days * DAY
        assert trusts(served[BUNDLE], served[CERTIFICATE], at)
        authority = renewed_authority(authority, "shop", at)
        served = leaf_data(authority, NAMES, at, served)
        assert trusts(former, served[CERTIFICATE], at)
        assert trusts(served[BUNDLE], served[CERTIFICATE], at)
        former = served[BUNDLE]


def test_an_authority_that_expired_unseen_is_replaced_at_once() -> None:
    late = NOON + AUTHORITY_LIFE + DAY
    renewed = renewed_authority(new_authority("shop", NOON), "shop", late)
    served = leaf_data(renewed, NAMES, late, None)
    assert trusts(served[BUNDLE], served[CERTIFICATE], late)


POD = "shop-broker-0.shop-brokers.apps.svc.cluster.local"


def test_the_operator_verifies_a_pod_by_its_name_or_a_certificate_of_the_user() -> None:
    authority = new_authority("shop", NOON)
    own = leaf_data(authority, NAMES, NOON, None)
    assert trust_of(own, POD).server_name is None
    assert trust_of(own, POD).authorities == authority.bundle.decode()
    users = leaf_data(authority, ["*.example.org", "bus.example.org"], NOON, None)
    alone = {CERTIFICATE: users[CERTIFICATE], KEY: users[KEY]}
    assert trust_of(alone, POD).server_name == "bus.example.org"
    assert trust_of(alone, POD).authorities == users[CERTIFICATE].decode()
    with pytest.raises(CertificateInvalid, match=r"tls\.crt is missing"):
        trust_of({}, POD)


@pytest.mark.parametrize("has_authority", [True, False])
async def test_the_operator_reaches_a_broker_with_a_certificate_of_the_user(
    tmp_path: Path, has_authority: bool
) -> None:
    """A server on this machine; a certificate for another name is refused."""
    now = datetime.now(UTC)
    made = leaf_data(new_authority("mine", now), ["bus.example.org"], now, None)
    secret = made if has_authority else {CERTIFICATE: made[CERTIFICATE], KEY: made[KEY]}
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / CERTIFICATE, tmp_path / KEY)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"fine": True})

    app = web.Application()
    app.router.add_get("/v1/namespace", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    trust = trust_of(secret, "127.0.0.1")
    try:
        for name, is_reached in ((trust.server_name, True), ("other.example.org", False)):

            async def access(name: str | None = name) -> Access:
                return Access(url, "token", trust.authorities, name)

            control = BusControl(access, 1, leads)
            try:
                assert await control.ask("GET", "/v1/namespace") == {"fine": True}
                assert is_reached
            except BackendUnavailable:
                assert not is_reached
            await control.close()
    finally:
        await runner.cleanup()


def test_unusable_data_is_explained_without_its_content() -> None:
    made = leaf_data(new_authority("shop", NOON), NAMES, NOON, None)
    other = leaf_data(new_authority("shop", NOON), NAMES, NOON, None)
    cases = [
        (made | {CERTIFICATE: b""}, "tls.crt is missing"),
        (made | {CERTIFICATE: b"secret"}, "tls.crt is not a certificate"),
        (made | {KEY: b"secret"}, "tls.key is not a private key"),
        (made | {KEY: other[KEY]}, "tls.key does not belong to tls.crt"),
        (made | {BUNDLE: b"secret"}, "ca.crt is not a certificate"),
    ]
    for data, said in cases:
        with pytest.raises(CertificateInvalid, match=said) as caught:
            checked_pair(data, NOON)
        assert "secret" not in str(caught.value)
    with pytest.raises(CertificateInvalid, match=r"expired at 2027-12-"):
        checked_pair(made, NOON + 400 * DAY)
    with pytest.raises(CertificateInvalid, match="not valid before"):
        checked_pair(made, NOON - DAY)
    old = new_authority("old", NOON - 4_000 * DAY).bundle
    with pytest.raises(CertificateInvalid, match=r"ca.crt expired at 20"):
        checked_pair(made | {BUNDLE: old}, NOON)
    checked_pair(made | {BUNDLE: old + made[BUNDLE]}, NOON)


@pytest.mark.parametrize("name", [CERTIFICATE, KEY, BUNDLE])
def test_a_damaged_authority_is_not_replaced(name: str) -> None:
    """Clients trust it: a person restores it from a backup."""
    data = new_authority("shop", NOON).data()
    with pytest.raises(CertificateInvalid):
        Authority.from_data(data | {name: b"garbage"})
    with pytest.raises(CertificateInvalid):
        Authority.from_data(data | {name: b""})


def test_an_authority_of_somebody_else_is_not_taken_over() -> None:
    """A Secret may have the name by chance: it must be neither used, nor renewed, nor deleted."""
    made = new_authority("shop", NOON)
    assert Authority.from_data(made.data()) == made
    server = leaf_data(made, NAMES, NOON, None)
    with pytest.raises(CertificateInvalid, match="no authority of a bus"):
        Authority.from_data(server)
