"""Requests of the driver to the bulk API. Bodies are the models of `postbus.contract.bulk`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from postbus.contract.bulk import (
    GENERATION_KEY,
    MAX_READER_CHARS,
    ROW_FORMAT,
    ROW_FORMAT_KEY,
    ClaimReaderGroup,
    PlanRanges,
    ReadableRanges,
    ReaderGroup,
    RejectedMessages,
    RejectMessages,
    SettlePlan,
)
from postbus_spark.errors import UnknownRows
from postbus_spark.limits import SPLITS, divided, parts_of
from postbus_spark.offsets import Offset
from postbus_spark.options import Options, check_grouped
from postbus_spark.rows import RowRange, bulk_path
from postbus_spark.tokens import Credentials, load_credentials
from postbus_spark.transport import Bus, call

Model = TypeVar("Model", bound=BaseModel)

TOKEN_AGE_S: Final = 1_200
"""A token is signed again when it is as old as this: a batch has 40 minutes of its hour left."""


class _Client:
    """It holds the key and must not be pickled."""

    def __init__(self, options: Options, credentials: Credentials | None = None) -> None:
        self._options = options
        self._credentials = credentials or load_credentials(options.connection_string_file)
        self._bus = Bus(options.endpoint or self._credentials.base_url, options.tls_ca_file)

    def __reduce__(self) -> str:
        raise TypeError("a client holds a key and stays with the driver")


class BrowseClient(_Client):
    """One entity, as the driver sees it in a mode without a reader group."""

    def row_ranges(self, count: int) -> list[RowRange]:
        """Return the ranges in which messages may be: about `count`, as executors get them.

        A partition has at most 1,024 of them, and one if it has no more.
        """
        options = self._options
        query = {"mode": options.mode, "subQueue": options.sub_queue, "splits": count}
        target = f"{bulk_path(options.entity, 'ranges')}?{urlencode(query)}"
        found = read_answer(
            ReadableRanges, call(self._bus, "GET", target, self._token_for("ranges"))
        )
        times = {"enqueuedFrom": options.from_ms, "enqueuedTo": options.to_ms}
        return [
            RowRange(
                bus=self._bus,
                entity=options.entity,
                sub_queue=options.sub_queue,
                group="",
                partition=each.partition,
                first=first,
                end=end,
                epoch=0,
                token=self._token_for("rows"),
                metadata={ROW_FORMAT_KEY: ROW_FORMAT, GENERATION_KEY: found.generation},
                generation_key=GENERATION_KEY,
                is_data_loss_fatal=options.is_data_loss_fatal,
                selection={"mode": str(options.mode)}
                | {name: time_ms for name, time_ms in times.items() if time_ms is not None},
            )
            for each in found.partitions
            for first, end in parts_of(each, len(found.partitions))
        ]

    def _token_for(self, below: str) -> str:
        return self._credentials.token(f"{self._options.entity}/$bulk/{below}", time.time())


class GroupClient(_Client):
    """One reader group, as the driver sees it."""

    def __init__(self, options: Options, credentials: Credentials | None = None) -> None:
        """Raises `InvalidOption` for a mode without a group, and `InvalidCredentials`."""
        check_grouped(options)
        super().__init__(options, credentials)
        self._token = ""
        self._signed_s = 0.0

    def token(self) -> str:
        """Return a token for the group, which lasts for a batch."""
        now_s = time.time()
        if not self._token or not 0 <= now_s - self._signed_s < TOKEN_AGE_S:
            path = f"{self._options.entity}/$bulk/groups/{self._options.reader_group}"
            self._token, self._signed_s = self._credentials.token(path, now_s), now_s
        return self._token

    def ranges(self, splits: int = 1) -> ReadableRanges:
        """Return what can be read, with the group."""
        query = self._query(group=self._options.reader_group, splits=splits)
        return self._get(ReadableRanges, f"{bulk_path(self._options.entity, 'ranges')}?{query}")

    def group(self) -> ReaderGroup:
        """Return the group."""
        return self._get(ReaderGroup, f"{self._group_path()}?{self._query()}")

    def claim(self) -> ReaderGroup:
        """Claim the group; an earlier reader is refused from then on."""
        reader = f"{socket.gethostname()}, process {os.getpid()}"[:MAX_READER_CHARS]
        body = ClaimReaderGroup(sub_queue=self._options.sub_queue, reader=reader)
        return self._post("claim", body, ReaderGroup)

    def plan(self, epoch: int, ranges: Mapping[int, tuple[int, int]]) -> ReaderGroup:
        """Plan to read ranges, which settles the plan before."""
        body = PlanRanges(sub_queue=self._options.sub_queue, epoch=epoch, ranges=dict(ranges))
        return self._post("plan", body, ReaderGroup)

    def settle(self, epoch: int, number: int) -> ReaderGroup:
        """Record that a plan is processed."""
        body = SettlePlan(sub_queue=self._options.sub_queue, epoch=epoch, number=number)
        return self._post("settle", body, ReaderGroup)

    def reject(self, body: RejectMessages) -> RejectedMessages:
        """Dead-letter messages of the planned range."""
        body = body.model_copy(update={"sub_queue": self._options.sub_queue})
        return self._post("reject", body, RejectedMessages)

    def offset(self, found: ReadableRanges | ReaderGroup, positions: Mapping[int, int]) -> Offset:
        return Offset(self._options.offset_entity, found.generation, dict(positions))

    def row_ranges(
        self, group: ReaderGroup, ranges: Mapping[int, tuple[int, int]], count: int
    ) -> list[RowRange]:
        """Return about `count` ranges, as executors get them, with about as many messages each."""
        found = self.ranges(SPLITS).partitions if count > len(ranges) else ()
        return [self._row_range(group, *each) for each in divided(ranges, count, found)]

    def _row_range(self, group: ReaderGroup, partition: int, first: int, end: int) -> RowRange:
        return RowRange(
            bus=self._bus,
            entity=self._options.entity,
            sub_queue=self._options.sub_queue,
            group=self._options.reader_group,
            partition=partition,
            first=first,
            end=end,
            epoch=group.epoch,
            token=self.token(),
            metadata={ROW_FORMAT_KEY: ROW_FORMAT, GENERATION_KEY: group.generation},
            generation_key=GENERATION_KEY,
            is_data_loss_fatal=self._options.is_data_loss_fatal,
        )

    def _group_path(self, *action: str) -> str:
        return bulk_path(self._options.entity, "groups", self._options.reader_group, *action)

    def _query(self, **more: Any) -> str:
        return urlencode({"subQueue": self._options.sub_queue, **more})

    def _get(self, model: type[Model], target: str) -> Model:
        return read_answer(model, call(self._bus, "GET", target, self.token()))

    def _post(self, action: str, body: BaseModel, model: type[Model]) -> Model:
        sent = body.model_dump(mode="json", by_alias=True)
        return read_answer(
            model, call(self._bus, "POST", self._group_path(action), self.token(), sent)
        )


def read_answer(model: type[Model], said: bytes) -> Model:
    """Return what the bus answered. Raises `UnknownRows` if that is none of its answers."""
    try:
        return model.model_validate_json(said)
    except ValidationError as error:
        raise UnknownRows(
            f"the bus answers in a way that this connector does not know"
            f" ({error.errors()[0]['loc']}): use the version that belongs to the bus"
        ) from None
