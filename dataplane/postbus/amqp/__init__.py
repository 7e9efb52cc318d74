"""The AMQP 1.0 engine: bytes in, events out; never a socket, a clock or an entity."""
