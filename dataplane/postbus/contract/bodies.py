"""Bases of the bodies of requests and answers, and names of sub-queues in them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

SubQueueName = Literal["main", "deadLetter", "transferDeadLetter"]


class Body(BaseModel):
    """Base of request bodies: camel case on the wire, unknown fields are rejected."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,
    )


class ResponseBody(BaseModel):
    """Base of response bodies."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, defer_build=True
    )
