"""Access of commands to a bus: contexts, the control API, AMQP."""
