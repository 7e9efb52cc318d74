"""Publishes what executors have staged, from the driver.

Publishing is one decision of the bus: from its answer on each message of the batch will arrive
once, whatever happens to driver, bus or receivers. The same batch is not published twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from postbus.contract.bulk import MAX_STAGE_BYTES, MAX_STAGED, PublishBatch, PublishedBatch
from postbus_spark.client import read_answer
from postbus_spark.errors import Unavailable, Unfinished, WriterNotFound
from postbus_spark.options import WriteOptions
from postbus_spark.rows import bulk_path
from postbus_spark.staging import StageTask, abort_stages
from postbus_spark.tokens import Credentials, load_credentials
from postbus_spark.transport import BUSY_S, Bus, Patience, Refused, call

TOKEN_S: Final = 86_400
"""Life of the token of tasks that stage: as long as what they stage. A load of many rows takes more
than an hour, and the token can only stage and publish under the name of its writer."""

LOG: Final = logging.getLogger("postbus_spark")


class WriterClient:
    """One writer, as the driver sees it. It holds the key and must not be pickled."""

    def __init__(self, options: WriteOptions, credentials: Credentials | None = None) -> None:
        self._options = options
        self._credentials = credentials or load_credentials(options.connection_string_file)
        self._bus = Bus(options.endpoint or self._credentials.base_url, options.tls_ca_file)

    def __reduce__(self) -> str:
        raise TypeError("a client holds a key and stays with the driver")

    def stage_task(self) -> StageTask:
        """Return what executors need to stage messages."""
        return StageTask(
            bus=self._bus,
            entity=self._options.entity,
            writer=self._options.writer,
            token=self._token(),
            max_bytes=MAX_STAGE_BYTES,
            max_messages=MAX_STAGED,
        )

    def last_batch(self) -> PublishedBatch | None:
        """Return the batch that was published last, if there is one."""
        try:
            answer = call(self._bus, "GET", self._path(), self._token())
        except WriterNotFound:
            return None
        return read_answer(PublishedBatch, answer)

    def publish(self, batch: int, stages: Sequence[int]) -> PublishedBatch:
        """Publish stages as a batch, unless it was published before: then they are removed.

        Waits until the batch before has arrived, and some seconds for this one. Raises
        `StaleWriter`, `StagesGone`, `Unfinished`.
        """
        last = self.last_batch()
        if last is not None and batch <= last.batch:
            LOG.info("batch %s of the writer %s was published before", batch, last.writer)
            abort_stages(self.stage_task(), stages)
            stages = ()
        elif last is not None:
            self.finish(last)
        return self._publish(batch, stages)

    def finish(
        self, published: PublishedBatch, is_stopped: Callable[[], bool] = lambda: False
    ) -> PublishedBatch:
        """Wait until a batch has arrived, or the wait is stopped; return its state.

        Raises `Unfinished` if nothing arrives for long.

        That it waits for room in its entity is no error before: rates and receivers take their
        time.
        """
        patience = Patience(f"batch {published.batch} of {published.writer}", limit_s=BUSY_S)
        while not published.is_done and not is_stopped():
            left = published.left
            published = self._publish(published.batch, ())
            if published.left < left:
                patience.progressed()
                continue
            try:
                patience.wait(Refused(published.waits_for))
            except Unavailable:
                raise Unfinished(
                    f"batch {published.batch} of the writer {published.writer} is published, and"
                    f" none of the {published.left} messages that are left could be sent to"
                    f" {self._options.entity} for {BUSY_S / 60:.0f} minutes:"
                    f" {published.waits_for or 'the bus does not say why'}. Nothing is lost, the"
                    " bus sends them as soon as it can: make room, and start again to wait for"
                    " them."
                ) from None
        return published

    def _publish(self, batch: int, stages: Sequence[int]) -> PublishedBatch:
        body = PublishBatch(batch=batch, stages=tuple(stages), rate=self._options.rate)
        sent = body.model_dump(mode="json", by_alias=True)
        answer = call(self._bus, "POST", self._path("publish"), self._token(), sent)
        return read_answer(PublishedBatch, answer)

    def _path(self, *action: str) -> str:
        return bulk_path(self._options.entity, "writers", self._options.writer, *action)

    def _token(self) -> str:
        path = f"{self._options.entity}/$bulk/writers/{self._options.writer}"
        return self._credentials.token(path, time.time(), TOKEN_S)
