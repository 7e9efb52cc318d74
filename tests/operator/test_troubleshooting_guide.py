"""docs/guides/kubernetes-troubleshooting.md names tests that exist, and each test of bad input."""

from __future__ import annotations

from tests.named_tests import named_tests, names_in

FILES = (
    "tests/kube/test_bad_input.py",
    "tests/kube/test_store_troubles.py",
    "e2e/tests/test_bad_input.py",
)


def test_each_row_of_the_guide_has_its_test() -> None:
    found = named_tests("docs/guides/kubernetes-troubleshooting.md")
    assert len(found) >= 30
    wanted = {(path, name) for path in FILES for name in names_in(path)}
    assert wanted <= set(found)
