"""Discovery: Spark imports modules whose names begin with `pyspark_` and takes `DefaultSource`.

It does so for every query of every user, in a worker: nothing heavy may be imported here.
"""

from postbus_spark.source import PostbusSource as DefaultSource

__all__ = ["DefaultSource"]
