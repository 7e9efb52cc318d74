"""Texts for people carry no secret, whatever an error of others says."""

from __future__ import annotations

import pytest

from postbus_operator.redaction import redacted


@pytest.mark.parametrize(
    "text",
    [
        "Endpoint=sb://x;SharedAccessKeyName=app;SharedAccessKey=hush=;EntityPath=q",
        "cannot connect to postgresql://postbus:hush@db:5432/postbus",
        "FATAL: bad options password=hush host=db",
        '{"password": "hush", "user": "x"}',
        "Authorization: Bearer hush",
        "SharedAccessSignature sr=x&sig=hush&se=1",
        "token=hush",
        "connection to PGPASSWORD=hush failed",
        "sslpassword='of two hush' host=db",
        "postgresql://postbus:hu@hush@db:5432/postbus",
    ],
)
def test_secrets_are_replaced(text: str) -> None:
    assert "hush" not in redacted(text)
    assert "***" in redacted(text)


def test_other_texts_stay() -> None:
    for text in (
        "the password of the Secret shop/db is wrong: mend key dsn",
        "https://shop-broker-0.shop-brokers.shop.svc:9465 does not answer",
        "SharedAccessKeyName=app",
    ):
        assert redacted(text) == text


def test_a_long_text_of_a_broker_takes_no_long_time() -> None:
    text = "://:" * 500_000
    assert redacted(text) == text
