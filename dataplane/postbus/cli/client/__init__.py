"""How commands reach a bus: contexts, the control API, AMQP."""
