from __future__ import annotations

import pytest
from pydantic import ValidationError

from postbus.process.settings import (
    Settings,
    SettingsError,
    is_loopback,
    load_settings,
    unknown_variables,
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"POSTBUS_{name.upper()}", raising=False)


def test_environment_is_read_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_PORT", "6000")
    monkeypatch.setenv("POSTBUS_LOG_FORMAT", "json")
    settings = load_settings()
    assert (settings.port, settings.log_format) == (6000, "json")


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_PORT", "6000")
    assert load_settings(port=7000).port == 7000
    assert load_settings(port=None).port == 6000


def test_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_PORT", "")
    assert load_settings().port == 5672


def test_mistake_is_named_as_the_user_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_TLS_PORT", "many")
    with pytest.raises(SettingsError) as caught:
        load_settings(metrics_port=99_999)
    named = {line.split(":")[0] for line in str(caught.value).splitlines()}
    assert named == {"--metrics-port", "POSTBUS_TLS_PORT"}


def test_address_of_the_database_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTBUS_STORES", "postgresql://me:hidden@db/bus")
    assert "hidden" not in repr(load_settings())


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_plain_connections_only_on_loopback_unless_asked_for(host: str, expected: bool) -> None:
    assert load_settings(host=host).listens_plain is expected
    assert load_settings(host=host, is_plain_enabled=True).listens_plain is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 6000, "tls_port": 6000}, "tls_port and port are both 6000"),
        ({"metrics_port": 5672}, "metrics_port and port are both 5672"),
        ({"tls_key_file": "server.key"}, "need each other"),
        ({"host": "0.0.0.0", "is_tls_enabled": False}, "no client could connect"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        load_settings(**settings)


def test_free_ports_do_not_clash() -> None:
    assert load_settings(port=0, tls_port=0, http_port=0, metrics_port=0).port == 0


def test_variables_close_to_a_setting_are_remarked() -> None:
    names = ["POSTBUS_LOGLEVEL", "POSTBUS_SERVICE_HOST", "POSTBUS_PORT", "PATH"]
    assert unknown_variables(names) == [
        "POSTBUS_LOGLEVEL is not a setting; did you mean POSTBUS_LOG_LEVEL?"
    ]


def test_loopback_by_name_and_address() -> None:
    assert is_loopback("127.8.8.8")
    assert not is_loopback("example.org")
