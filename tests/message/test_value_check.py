"""Value bodies are checked as a decoder would, without decoding them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postbus.message.codec import Array, DecodeError, Described, Symbol, decode_value, encode_value
from postbus.message.sections import explode_batch, slice_message
from postbus.message.value_check import MAX_VALUES, check_value
from tests.message.wire_values import VALUES, section

CUT_LIST = b"\xc0\x08\x03\x54\x01\xa1\x09ab"
"""A list whose last item is longer than the list."""


def can_be_decoded(data: bytes) -> bool:
    try:
        decode_value(data)
    except DecodeError:
        return False
    return True


def is_accepted(data: bytes) -> bool:
    try:
        after, _ = check_value(data, 0, len(data))
    except DecodeError:
        return False
    assert after == decode_value(data)[1]
    return True


@given(VALUES)
def test_every_value_is_accepted(value: object) -> None:
    assert is_accepted(encode_value(value))


@given(VALUES, st.data())
def test_damage_is_noticed_exactly_when_a_decoder_notices_it(
    value: object, data: st.DataObject
) -> None:
    encoded = bytearray(encode_value(value))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    del encoded[data.draw(st.integers(1, len(encoded))) :]
    assert is_accepted(bytes(encoded)) == can_be_decoded(bytes(encoded))


@given(st.binary(max_size=40))
def test_noise_is_refused_as_a_decoder_does(data: bytes) -> None:
    assert is_accepted(data) == can_be_decoded(data)


@pytest.mark.parametrize(
    "body",
    [
        CUT_LIST,
        b"\xc1\x02\x01\x40",  # a key without a value
        b"\xc1\x03\x02\x45\x40",  # a list as a key
        b"\xc1\x06\x02\x00\x54\x01\xc0\x01\x00",  # a described list as a key
        b"\xa1\x02\xff\xfe",
        b"\x00" * 40 + b"\x40" * 41,
        b"\xc0\x04\x01\xc0\x01\x01",
        b"\xe0\x03\x02\x54\x01",
        b"\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40",
        b"\x3f",
    ],
    ids=lambda body: body[:8].hex(),
)
def test_values_that_no_client_can_decode_are_refused(body: bytes) -> None:
    for code in (b"\x00\x53\x77", b"\x00\x53\x76\xc0" + bytes([len(body) + 1, 1])):
        with pytest.raises(DecodeError):
            slice_message(code + body)
    assert slice_message(b"\x00\x53\x75\xa0" + bytes([len(body)]) + body).body


def test_values_of_a_body_are_counted_together() -> None:
    numbers = [1] * (MAX_VALUES - 1)
    assert slice_message(section(0x77, numbers))
    with pytest.raises(DecodeError, match="more than 50000 values"):
        slice_message(section(0x77, [*numbers, 1]))
    with pytest.raises(DecodeError, match="more than 50000 values"):
        slice_message(section(0x76, numbers) + section(0x76, [1, 2]))
    with pytest.raises(DecodeError, match="more than 50000 values"):
        slice_message(section(0x77, Array(0xA1, [""] * MAX_VALUES)))


def test_values_of_a_batch_are_counted_together() -> None:
    half = section(0x77, [1] * (MAX_VALUES // 2 - 1))
    assert len(explode_batch(section(0x75, half) * 2)) == 2
    with pytest.raises(DecodeError, match="more than 50000 values"):
        explode_batch(section(0x75, half) * 2 + section(0x75, section(0x77, 1)))


def test_long_texts_and_arrays_of_numbers_are_one_value() -> None:
    for value in ("x" * 1_000_000, Array(0x71, [1] * 200_000), Described(Symbol("a"), b"x" * 9)):
        assert slice_message(section(0x77, value))


def test_arrays_of_items_without_octets_count_as_many_values() -> None:
    """An array of five octets is decoded into up to 128 nulls."""
    nulls = b"\xe0\x02\x80\x40"
    count = MAX_VALUES // 100
    body = (nulls * count, count)
    data = b"\xd0" + (len(body[0]) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + body[0]
    with pytest.raises(DecodeError, match="more than"):
        check_value(data, 0, len(data))
    texts = b"\xe0\x04\x01\xa1\x01x"
    many = texts * 5_000
    data = b"\xd0" + (len(many) + 4).to_bytes(4, "big") + (5_000).to_bytes(4, "big") + many
    assert check_value(data, 0, len(data))[0] == len(data)
