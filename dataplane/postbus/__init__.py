"""Postbus: a service bus with the semantics and wire protocol of Azure Service Bus, durable in Postgres."""

__version__ = "0.1.0"
