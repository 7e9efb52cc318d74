"""AMQP: connections, links and the endpoints of links."""
