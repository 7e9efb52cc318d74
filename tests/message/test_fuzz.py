"""A short, repeatable run of the fuzzer; `fuzz_message.py` runs longer ones."""

from __future__ import annotations

import pytest

from tests.message.fuzz_message import check, fuzz, load_corpus


@pytest.mark.slow
def test_damaged_messages_are_refused_or_survive_storing_and_delivery() -> None:
    tried, accepted = fuzz(seconds=60, seed=7, max_inputs=1_500)
    assert tried == 1_500
    assert accepted > 50


def test_every_capture_is_accepted() -> None:
    corpus = load_corpus()
    assert len(corpus) >= 15
    assert all(check(data) for data in corpus)
