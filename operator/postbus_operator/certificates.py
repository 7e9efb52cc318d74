"""Certificates of a bus: its own authority, the leaves it signs, and certificates of users.

An authority is renewed long before it ends, in three steps: the next one is made and joins the
bundle that clients trust; after `OVERLAP`, when everybody has the bundle, it signs the leaves; the
former one leaves the bundle when it has expired. Brokers and stores read their files again, so that
no step restarts one. Times are arguments. Data have the keys of a Secret of type kubernetes.io/tls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_address
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
BUNDLE: Final = "ca.crt"
NEXT_CERTIFICATE: Final = "next.crt"
NEXT_KEY: Final = "next.key"

AUTHORITY_LIFE: Final = timedelta(days=3_650)
AUTHORITY_RENEWAL: Final = timedelta(days=365)
"""Remaining life at which the next authority is made. Our choice: an operator may be away for most
of a year."""

OVERLAP: Final = timedelta(days=30)
"""Time for clients to get the bundle with the next authority. Our choice."""

LEAF_LIFE: Final = timedelta(days=397)
"""The longest that Apple's TLS and browsers accept."""

LEAF_RENEWAL: Final = timedelta(days=120)
BACKDATE: Final = timedelta(hours=1)
"""For clients with a slow clock."""

MAX_COMMON_NAME: Final = 64
OUR_SUBJECT: Final = "Postbus "
"""Beginning of the common name of each authority that is made here."""

Data = Mapping[str, bytes]


class CertificateInvalid(Exception):
    """A certificate or key cannot be used; the text says why, without its content."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        """The first certificate; raises `CertificateInvalid`."""
        return parse_chain(self.certificate, CERTIFICATE)[0]

    def private_key(self) -> ec.EllipticCurvePrivateKey:
        """Return the key of an authority; raises `CertificateInvalid`."""
        try:
            key = serialization.load_pem_private_key(self.key, None)
        except (ValueError, TypeError):
            raise CertificateInvalid(f"{KEY} is not a private key in PEM form") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateInvalid(f"{KEY} is not a key of an elliptic curve")
        if key.public_key() != self.parsed.public_key():
            raise CertificateInvalid(f"{KEY} does not belong to {CERTIFICATE}")
        return key


@dataclass(frozen=True, slots=True)
class Trust:
    """Certificates (PEM) that a client trusts. `server_name`: verified instead of the host."""

    authorities: str
    server_name: str | None


@dataclass(frozen=True, slots=True)
class Authority:
    """The authority of a bus: `current` signs; `bundle` is what clients trust, PEM."""

    current: Pair
    next: Pair | None
    bundle: bytes

    @classmethod
    def from_data(cls, data: Data) -> Self:
        """Return the authority of a Secret; raises `CertificateInvalid`."""
        for name in (CERTIFICATE, KEY, BUNDLE):
            if not data.get(name):
                raise CertificateInvalid(f"{name} is missing")
        current = Pair(data[CERTIFICATE], data[KEY])
        if not _is_made_here(current.parsed):
            raise CertificateInvalid(f"{CERTIFICATE} is no authority of a bus: rename its Secret")
        following = None
        if data.get(NEXT_CERTIFICATE) and data.get(NEXT_KEY):
            following = Pair(data[NEXT_CERTIFICATE], data[NEXT_KEY])
            following.private_key()
        current.private_key()
        parse_chain(data[BUNDLE], BUNDLE)
        return cls(current, following, data[BUNDLE])

    def data(self) -> dict[str, bytes]:
        """Return the data of its Secret."""
        said = {
            CERTIFICATE: self.current.certificate,
            KEY: self.current.key,
            BUNDLE: self.bundle,
        }
        if self.next is not None:
            said |= {NEXT_CERTIFICATE: self.next.certificate, NEXT_KEY: self.next.key}
        return said


def new_authority(name: str, now: datetime) -> Authority:
    """Return the authority of a new bus."""
    made = _made_authority(name, now)
    return Authority(made, None, made.certificate)


def renewed_authority(authority: Authority, name: str, now: datetime) -> Authority:
    """Return an authority after the step of a renewal that is due, or as it is."""
    current, following = authority.current, authority.next
    ends = current.parsed.not_valid_after_utc
    if following is None and now >= ends - AUTHORITY_RENEWAL:
        following = _made_authority(name, now)
    if following is not None:
        begins = following.parsed.not_valid_before_utc + BACKDATE
        if now >= min(begins + OVERLAP, ends):
            current, following = following, None
    trusted = [
        each
        for each in parse_chain(authority.bundle, BUNDLE)
        if each.not_valid_after_utc > now or each == current.parsed
    ]
    for pair in (current, following):
        if pair is not None and pair.parsed not in trusted:
            trusted.append(pair.parsed)
    bundle = b"".join(each.public_bytes(Encoding.PEM) for each in trusted)
    return Authority(current, following, bundle)


def leaf_data(
    authority: Authority, names: Sequence[str], now: datetime, former: Data | None
) -> dict[str, bytes]:
    """Return the Secret's data of a server with these names; the former pair if it is still good.

    Names are host names, wildcards or addresses.
    """
    pair = None
    if former is not None and _is_good(former, authority, names, now):
        pair = Pair(former[CERTIFICATE], former[KEY])
    if pair is None:
        pair = _made_leaf(authority, names, now)
    return {CERTIFICATE: pair.certificate, KEY: pair.key, BUNDLE: authority.bundle}


def checked_pair(data: Data, now: datetime) -> x509.Certificate:
    """Return the certificate of a user's Secret; raises `CertificateInvalid`."""
    for name in (CERTIFICATE, KEY):
        if not data.get(name):
            raise CertificateInvalid(f"{name} is missing")
    certificate = parse_chain(data[CERTIFICATE], CERTIFICATE)[0]
    try:
        key = serialization.load_pem_private_key(data[KEY], None)
    except (ValueError, TypeError):
        raise CertificateInvalid(
            f"{KEY} is not a private key in PEM form without a password"
        ) from None
    if key.public_key() != certificate.public_key():
        raise CertificateInvalid(f"{KEY} does not belong to {CERTIFICATE}")
    if now >= certificate.not_valid_after_utc:
        ended = certificate.not_valid_after_utc
        raise CertificateInvalid(f"{CERTIFICATE} expired at {ended:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        begins = certificate.not_valid_before_utc
        raise CertificateInvalid(f"{CERTIFICATE} is not valid before {begins:%Y-%m-%d %H:%M} UTC")
    if data.get(BUNDLE):
        parse_authorities(data[BUNDLE], BUNDLE, now)
    return certificate


def parse_authorities(text: bytes, name: str, now: datetime) -> list[x509.Certificate]:
    """Return the certificates of authorities; one at least must not have expired.

    Raises `CertificateInvalid`.
    """
    found = parse_chain(text, name)
    end = max(each.not_valid_after_utc for each in found)
    if now >= end:
        raise CertificateInvalid(f"{name} expired at {end:%Y-%m-%d %H:%M} UTC")
    return found


def parse_chain(text: bytes, name: str) -> list[x509.Certificate]:
    """Return the certificates of a PEM text; raises `CertificateInvalid`, which says `name`."""
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError:
        raise CertificateInvalid(f"{name} is not a certificate in PEM form") from None


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = found.get_values_for_type(x509.IPAddress)
    return [*found.get_values_for_type(x509.DNSName), *(str(each) for each in addresses)]


def trust_of(data: Data, host: str) -> Trust:
    """Return how a client that connects to `host` verifies a server with this Secret.

    Without authorities in it, its own certificates are trusted. Raises `CertificateInvalid`.
    """
    for name in (CERTIFICATE, BUNDLE):
        if data.get(name):
            parse_chain(data[name], name)
    if not data.get(CERTIFICATE):
        raise CertificateInvalid(f"{CERTIFICATE} is missing")
    names = names_of(parse_chain(data[CERTIFICATE], CERTIFICATE)[0])
    is_named = host in names or f"*.{host.partition('.')[2]}" in names
    others = [each for each in names if not each.startswith("*.")]
    authorities = data.get(BUNDLE) or data[CERTIFICATE]
    return Trust(authorities.decode("ascii"), None if is_named or not others else others[0])


def _is_good(former: Data, authority: Authority, names: Sequence[str], now: datetime) -> bool:
    try:
        certificate = checked_pair(former, now)
        certificate.verify_directly_issued_by(authority.current.parsed)
    except (CertificateInvalid, InvalidSignature, ValueError, TypeError):
        return False
    is_young = now < certificate.not_valid_after_utc - LEAF_RENEWAL
    # An authority near its end signs leaves that end with it.
    is_best = certificate.not_valid_after_utc >= authority.current.parsed.not_valid_after_utc
    return (is_young or is_best) and set(names_of(certificate)) == set(names)


def _made_authority(name: str, now: datetime) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    suffix = f" {now:%Y%m%d%H%M%S}"
    subject = _subject(f"{OUR_SUBJECT}{name}"[: MAX_COMMON_NAME - len(suffix)] + suffix)
    made = _builder(subject, subject, key.public_key(), now, now + AUTHORITY_LIFE, key)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(_usage(is_authority=True), critical=True)
    return _pair(made, key, key)


def _is_made_here(certificate: x509.Certificate) -> bool:
    """Return whether a certificate is an authority that `_made_authority` has made."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return any(str(each.value).startswith(OUR_SUBJECT) for each in names)


def _made_leaf(authority: Authority, names: Sequence[str], now: datetime) -> Pair:
    issuer = authority.current.parsed
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + LEAF_LIFE - BACKDATE, issuer.not_valid_after_utc)
    signer = authority.current.private_key()
    # An empty subject: clients compare alternative names, and a common name is too short for some.
    made = _builder(x509.Name([]), issuer.subject, key.public_key(), now, end, signer)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(is_authority=False), critical=True)
    made = made.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    made = made.add_extension(
        x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=True
    )
    return _pair(made, key, signer)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
    signer: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _pair(
    made: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
) -> Pair:
    certificate = made.sign(signer, hashes.SHA256())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Pair(certificate.public_bytes(Encoding.PEM), private)


def _subject(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
