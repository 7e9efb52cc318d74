"""Queues, topics and subscriptions: plans as pure functions, and the reconciler that does them."""
