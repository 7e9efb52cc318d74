"""Messages on their way between entities: the outbox and what arrives from one."""
