"""The base of commands: each names the type of its reply."""

from __future__ import annotations

from typing import Generic, TypeVar

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Expects(Generic[R_co]):
    """Base of commands, with the type of the reply to one that is not refused."""

    __slots__ = ()
