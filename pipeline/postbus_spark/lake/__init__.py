"""Tables of a lake: files that executors write, and commits of the driver that make them count."""
