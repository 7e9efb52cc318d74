"""The data source `postbus` of Spark.

Spark makes one on the driver and pickles it with each query: it holds options and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from postbus_spark.options import Options, WriteOptions
    from postbus_spark.reader import BatchReader
    from postbus_spark.stream import StreamReader
    from postbus_spark.writer import BatchWriter, StreamWriter


class PostbusSource(DataSource):
    """The format `postbus` of `spark.read`, `readStream`, `write` and `writeStream`."""

    @classmethod
    def name(cls) -> str:
        return "postbus"

    def schema(self) -> str:
        """Return the columns for a query that names none."""
        from postbus_spark.schema import ddl, default_columns

        options = self._options()
        return ddl(
            default_columns(
                options.properties_format,
                is_raw_included=options.is_raw_included,
                is_history=options.mode == "history",
            )
        )

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of a batch query."""
        from postbus_spark.reader import BatchReader

        return BatchReader(self._options(), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a streaming query."""
        check_version()
        from postbus_spark.stream import StreamReader

        return StreamReader(self._options(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer of a batch query."""
        check_version()
        from postbus_spark.writer import BatchWriter

        return BatchWriter(self._write_options(), schema, is_overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Return the writer of a streaming query."""
        check_version()
        from postbus_spark.writer import StreamWriter

        return StreamWriter(self._write_options(), schema, is_overwrite=overwrite)

    def _write_options(self) -> WriteOptions:
        from postbus_spark.options import write_options

        return write_options(self.options.copy())  # type: ignore[attr-defined]

    def _options(self) -> Options:
        from postbus_spark.options import read_options

        return read_options(self.options.copy())  # type: ignore[attr-defined]


def check_version() -> None:
    """Raise `UnsupportedSpark` for a PySpark that cannot limit the size of a batch."""
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow  # noqa: F401
    except ImportError:
        from pyspark import __version__

        from postbus_spark.errors import UnsupportedSpark

        raise UnsupportedSpark(
            f"PySpark {__version__} cannot limit the size of a batch of a Python data source:"
            " streams of Postbus, and writing, need PySpark 4.2 or newer."
        ) from None
