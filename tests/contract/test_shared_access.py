"""The bytes of a shared access signature."""

from __future__ import annotations

from postbus.contract.shared_access import make_token


def test_a_token_has_the_signature_that_openssl_makes() -> None:
    """`printf 'RESOURCE\\n1700000000' | openssl dgst -sha256 -hmac KEY -binary | base64`"""
    assert make_token("http://bus/Orders/a b", "my rule", "k€y+/=", 1_700_000_000) == (
        "SharedAccessSignature sr=http%3A%2F%2Fbus%2FOrders%2Fa+b"
        "&sig=s7lIfER2SSqhU%2BlGXwJTHIxgVycYdtAL6SLzD8WCI%2B4%3D&se=1700000000&skn=my+rule"
    )
