"""Error conditions of AMQP 1.0 and of Service Bus, and errors by scope.

The class of an error determines the frame that reports it: close, end or detach.
"""

from __future__ import annotations

from typing import Final

NOT_FOUND: Final = "amqp:not-found"
UNAUTHORIZED_ACCESS: Final = "amqp:unauthorized-access"
DECODE_ERROR: Final = "amqp:decode-error"
RESOURCE_LIMIT_EXCEEDED: Final = "amqp:resource-limit-exceeded"
NOT_ALLOWED: Final = "amqp:not-allowed"
INVALID_FIELD: Final = "amqp:invalid-field"
NOT_IMPLEMENTED: Final = "amqp:not-implemented"
ILLEGAL_STATE: Final = "amqp:illegal-state"
CONNECTION_FORCED: Final = "amqp:connection:forced"
FRAMING_ERROR: Final = "amqp:connection:framing-error"
ERRANT_LINK: Final = "amqp:session:errant-link"
HANDLE_IN_USE: Final = "amqp:session:handle-in-use"
UNATTACHED_HANDLE: Final = "amqp:session:unattached-handle"
DETACH_FORCED: Final = "amqp:link:detach-forced"
STOLEN: Final = "amqp:link:stolen"
TRANSACTION_UNKNOWN_ID: Final = "amqp:transaction:unknown-id"
TRANSACTION_ROLLBACK: Final = "amqp:transaction:rollback"
TRANSACTION_TIMEOUT: Final = "amqp:transaction:timeout"
TRANSFER_LIMIT_EXCEEDED: Final = "amqp:link:transfer-limit-exceeded"
MESSAGE_SIZE_EXCEEDED: Final = "amqp:link:message-size-exceeded"

TIMEOUT: Final = "com.microsoft:timeout"
SERVER_BUSY: Final = "com.microsoft:server-busy"
ARGUMENT_ERROR: Final = "com.microsoft:argument-error"
ARGUMENT_OUT_OF_RANGE: Final = "com.microsoft:argument-out-of-range"
ENTITY_DISABLED: Final = "com.microsoft:entity-disabled"
MESSAGE_LOCK_LOST: Final = "com.microsoft:message-lock-lost"
MESSAGE_NOT_FOUND: Final = "com.microsoft:message-not-found"
SESSION_LOCK_LOST: Final = "com.microsoft:session-lock-lost"
SESSION_CANNOT_BE_LOCKED: Final = "com.microsoft:session-cannot-be-locked"
ENTITY_ALREADY_EXISTS: Final = "com.microsoft:entity-already-exists"
DEAD_LETTER: Final = "com.microsoft:dead-letter"


class AmqpError(Exception):
    """A condition and a description for the peer."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(condition, description)
        self.condition = condition
        self.description = description


class AmqpConnectionError(AmqpError):
    """Ends the connection."""


class AmqpSessionError(AmqpError):
    """Ends the session."""


class AmqpLinkError(AmqpError):
    """Detaches the link."""
