"""Messages of a bus as tables of Spark, and as record batches without a JVM.

Executors import neither the contract nor pydantic: what they need travels in the partitions. Names
are imported when they are used, since `pyspark_postbus` imports this package for every query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postbus_spark.batches import read_batches as read_batches
    from postbus_spark.causes import dead_letter_causes as dead_letter_causes
    from postbus_spark.publish import Writer as Writer
    from postbus_spark.publish import publish_messages as publish_messages
    from postbus_spark.rejects import reject_messages as reject_messages
    from postbus_spark.source import PostbusSource as PostbusSource

__all__ = [
    "PostbusSource", "Writer", "dead_letter_causes", "publish_messages", "read_batches",
    "reject_messages",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name."""
    if name == "read_batches":
        from postbus_spark.batches import read_batches

        return read_batches
    if name == "dead_letter_causes":
        from postbus_spark.causes import dead_letter_causes

        return dead_letter_causes
    if name == "reject_messages":
        from postbus_spark.rejects import reject_messages

        return reject_messages
    if name == "Writer":
        from postbus_spark.publish import Writer

        return Writer
    if name == "publish_messages":
        from postbus_spark.publish import publish_messages

        return publish_messages
    if name == "PostbusSource":
        from postbus_spark.source import PostbusSource

        return PostbusSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
