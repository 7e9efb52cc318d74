"""Messages on their way between entities: outbox and inbox."""
