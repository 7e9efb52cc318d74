"""Postbus: a service bus like Azure Service Bus on the wire, durable in Postgres."""

__version__ = "0.1.0"
