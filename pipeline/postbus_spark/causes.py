"""Dead letters by cause: reason, source, and what their descriptions have in common.

Descriptions are compared as `postbus dlq summary` does it: words with a digit, an @ or ://, which
differ between deaths of one cause, become `*`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DESCRIPTION_CHARS: Final = 300
"""Length of a description that is compared. As the bus has it."""

WORD: Final = r"""[^\s,;()\[\]{}"'<>=|]"""
VARYING: Final = rf"{WORD}*(?:[0-9@]|://){WORD}*?([.:!?]*)(?!{WORD})"
"""A word that is taken out, and the punctuation at its end, which stays. For Java and Python."""

NEEDED: Final = (
    "sequence_number", "enqueued_time", "message_id", "dead_letter_source", "dead_letter_reason",
    "dead_letter_error_description",
)  # fmt: skip
"""Columns of dead letters that are read to group them."""


def dead_letter_causes(letters: DataFrame) -> DataFrame:
    """Return a row for each cause of dead letters, the most frequent one first.

    Columns: reason, source, description, letters (how many), first_enqueued_time,
    last_enqueued_time (of their sends), and example_number, example_id, example_description of the
    first one. `letters` is a frame in the mode peek with the columns `NEEDED`.
    """
    from pyspark.sql import functions

    example = functions.min_by(
        functions.struct("sequence_number", "message_id", "dead_letter_error_description"),
        "sequence_number",
    )
    groups = letters.groupBy(
        functions.col("dead_letter_reason").alias("reason"),
        functions.col("dead_letter_source").alias("source"),
        without_details(functions.col("dead_letter_error_description")).alias("description"),
    ).agg(
        functions.count("*").alias("letters"),
        functions.min("enqueued_time").alias("first_enqueued_time"),
        functions.max("enqueued_time").alias("last_enqueued_time"),
        example.alias("example"),
    )
    return groups.select(
        "reason", "source", "description", "letters", "first_enqueued_time", "last_enqueued_time",
        functions.col("example.sequence_number").alias("example_number"),
        functions.col("example.message_id").alias("example_id"),
        functions.col("example.dead_letter_error_description").alias("example_description"),
    ).orderBy(functions.desc("letters"), "reason", "source", "description")  # fmt: skip


def without_details(description: Column) -> Column:
    """Return descriptions without the words that differ between deaths of one cause."""
    from pyspark.sql import functions

    beginning = functions.substring(description, 1, DESCRIPTION_CHARS)
    return functions.regexp_replace(beginning, VARYING, "*$1")
