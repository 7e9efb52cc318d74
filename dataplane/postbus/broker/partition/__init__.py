"""One partition in a broker: order, commits, timers, receivers, ownership, forwarding, activity."""
