"""Messages of queue.1, read by the reader group `declarative`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession


@dp.table
def orders() -> DataFrame:
    """Keep each message once."""
    messages = (
        SparkSession.active()
        .readStream.format("postbus")
        .option("entity", "queue.1")
        .option("readerGroup", "declarative")
        .load()
    )
    return messages.selectExpr(
        "message_id",
        "enqueued_time",
        "from_json(cast(body as string), 'sku string, amount double') as order",
    )


dp.create_sink("large", "postbus", {"entity": "orders", "writer": "declarative"})


@dp.append_flow(target="large")
def large_orders() -> DataFrame:
    """Send orders of more than 100 to orders."""
    rows = SparkSession.active().readStream.table("orders").where("order.amount > 100")
    return rows.selectExpr("message_id", "to_json(order) as body")
