"""Message sessions of one queue."""
