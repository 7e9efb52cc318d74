"""Connection strings: what they name, and that no error shows a key."""

from __future__ import annotations

import pytest

from postbus.contract.connection_strings import parse_connection_string

KEY = "SharedAccessKeyName=n;SharedAccessKey=a=b="


@pytest.mark.parametrize(
    ("text", "host", "port", "is_tls"),
    [
        (f"Endpoint=sb://h;{KEY}", "h", 5671, True),
        (f"endpoint=sb://h:99/;{KEY.lower()};", "h", 99, True),
        (f" Endpoint = amqps://h ; {KEY} ;\n", "h", 5671, True),
        (f"Endpoint=sb://h;{KEY};UseDevelopmentEmulator=true", "h", 5672, False),
        (f"Endpoint=sb://[::1]:7;{KEY}", "::1", 7, True),
        (f"Endpoint=sb://h;{KEY};SharedAccessSignature=", "h", 5671, True),
    ],
)
def test_connection_string_names_endpoint_and_rule(
    text: str, host: str, port: int, is_tls: bool
) -> None:
    found = parse_connection_string(text)
    assert (found.host, found.port, found.is_tls) == (host, port, is_tls)
    assert (found.rule, found.key, found.signature) == ("n", "a=b=", None)
    assert "a=b=" not in repr(found)


def test_a_signature_stands_for_a_key() -> None:
    words = "Endpoint=sb://h;SharedAccessSignature=SharedAccessSignature sr=x;EntityPath=orders"
    found = parse_connection_string(words)
    assert (found.rule, found.key, found.entity) == (None, None, "orders")
    assert found.signature == "SharedAccessSignature sr=x"
    assert "sr=x" not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        "Endpoint=http://h;SharedAccessKeyName=n;SharedAccessKey=secret",
        "Endpoint=sb://h:many;SharedAccessKeyName=n;SharedAccessKey=secret",
        "Endpoint=sb://[h;SharedAccessKeyName=n;SharedAccessKey=secret",
        "Endpoint=sb://h;Endpoint=sb://i;SharedAccessKeyName=n;SharedAccessKey=secret",
    ],
)
def test_another_text_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="no connection string, which has the form") as refused:
        parse_connection_string(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "words",
    ["", "SharedAccessKeyName=n", "SharedAccessKey=secret", "SharedAccessSignature="],
)
def test_a_missing_credential_is_named(words: str) -> None:
    with pytest.raises(ValueError, match="neither SharedAccessKeyName with") as refused:
        parse_connection_string(f"Endpoint=sb://h;{words}")
    assert "secret" not in str(refused.value)
