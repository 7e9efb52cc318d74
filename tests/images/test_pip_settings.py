"""Settings of pip that a build of images takes over from the machine that runs it."""

from __future__ import annotations

from pathlib import Path

from e2e.pip_settings import read_settings, write_settings

LISTED = r"""
:env:.index-url='https://user:pass@index.example/simple'
:env:.extra-index-url='https://a.example/simple\nhttps://b.example/simple'
:env:.find-links='/opt/wheels'
global.index-url='https://other.example/simple'
global.trusted-host='index.example'
install.timeout='60'
""".strip()


def test_settings_of_the_environment_win() -> None:
    assert read_settings(LISTED)["index-url"] == "https://user:pass@index.example/simple"


def test_only_settings_that_reach_an_index_are_passed(tmp_path: Path) -> None:
    """A folder of this machine does not exist in the build."""
    write_settings(read_settings(LISTED), tmp_path)
    assert (tmp_path / "pip.conf").read_text().splitlines() == [
        "[global]",
        "extra-index-url = https://a.example/simple",
        "    https://b.example/simple",
        "index-url = https://user:pass@index.example/simple",
        "timeout = 60",
        "trusted-host = index.example",
    ]
    assert (tmp_path / "ca.crt").read_bytes() == b""


def test_certificates_are_copied_and_named_by_their_place_in_the_build(tmp_path: Path) -> None:
    here = tmp_path / "company.pem"
    here.write_bytes(b"certificates")
    write_settings({"cert": str(here)}, tmp_path)
    assert (tmp_path / "ca.crt").read_bytes() == b"certificates"
    assert (tmp_path / "pip.conf").read_text() == "[global]\ncert = /run/secrets/ca.crt\n"
