"""The AMQP door: connections, links and what stands behind them."""
