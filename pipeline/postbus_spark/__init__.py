"""Messages of a bus as tables of Spark, and as record batches without a JVM."""
