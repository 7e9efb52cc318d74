"""Amounts in Kubernetes' canonical form, as the API server writes them into an object.

Source: `Quantity` of k8s.io/apimachinery. Without this, an object with `0.5Gi` would look changed
after each apply, since the server returns `512Mi`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DECIMAL: Final = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
PARTS: Final = re.compile(r"([0-9]*\.?[0-9]*)(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]+))?")
LARGEST: Final = 2**63 - 1
"""The server cuts larger amounts to this one."""


def quantity_value(text: str | int) -> Fraction:
    """Return an amount as a number, such as 536870912 for `0.5Gi`."""
    number, binary, decimal, exponent = _parts(text)
    if binary:
        return _scaled(number, 1024, BINARY.index(binary))
    if decimal:
        return _scaled(number, 1000, _power(decimal))
    return _scaled(number, 10, int(exponent or 0))


def canonical_quantity(text: str | int) -> str:
    """Return an amount as the API server writes it: no fraction, the largest suffix."""
    _, binary, _, exponent = _parts(text)
    value = min(quantity_value(text), Fraction(LARGEST))
    if binary and value >= 1024 and value.denominator == 1:
        power = 0
        while power < len(BINARY) - 1 and value.numerator % 1024 ** (power + 1) == 0:
            power += 1
        return f"{value.numerator // 1024**power}{BINARY[power]}"
    if value == 0:
        return "0"
    nanos = -(-value * 10**9 // 1)  # rounded up
    power = 0
    while nanos % 1000 == 0:
        nanos, power = nanos // 1000, power + 1
    power -= 3
    if exponent:
        return f"{nanos}e{3 * power}" if power else f"{nanos}"
    if power > max(DECIMAL):
        nanos, power = nanos * 1000 ** (power - max(DECIMAL)), max(DECIMAL)
    return f"{nanos}{DECIMAL[power]}"


def _parts(text: str | int) -> tuple[Fraction, str, str, str]:
    found = PARTS.fullmatch(str(text))
    assert found is not None, "models accept quantities only"
    return Fraction(found[1].rstrip(".")), found[2] or "", found[3] or "", found[4] or ""


def _power(suffix: str) -> int:
    return next(power for power, each in DECIMAL.items() if each == suffix)


def _scaled(number: Fraction, base: int, power: int) -> Fraction:
    scale = Fraction(base ** abs(power))
    return number * scale if power >= 0 else number / scale
