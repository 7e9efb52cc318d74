"""`postbus token`: the value of an `Authorization` header for curl and other HTTP clients.

It is computed from the connection string without a request. It neither contains nor reveals the
key.
"""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from postbus.cli.client.contexts import ConnectionString, ContextName, find_target
from postbus.cli.commands.development import read_duration
from postbus.cli.failures import ContextError, examples, expected_failures

EPILOG: Final = examples(
    "postbus token                                      for all rights of the key, for 1 hour",
    "postbus token orders --expires 5m                  for one entity, for five minutes",
    'curl -H "Authorization: $(postbus token)" -d hi localhost:5300/jobs/messages',
)


def token(
    entity: Annotated[
        str | None,
        typer.Argument(help="Queue, topic or subscription; default: all that the key covers."),
    ] = None,
    expires: Annotated[
        str, typer.Option("--expires", parser=read_duration, metavar="DURATION", help="Validity.")
    ] = "PT1H",
    connection_string: ConnectionString = None,
    context: ContextName = None,
) -> None:
    """Print a shared access signature for the Authorization header."""
    from postbus.cli.client.connection_strings import read_connection_string
    from postbus.contract.durations import parse_duration_ms
    from postbus.contract.shared_access import make_token

    with expected_failures():
        target = find_target(context, connection_string=connection_string)
        endpoint = read_connection_string(target.connection_string())
        if endpoint.rule is None or endpoint.key is None:
            raise ContextError(
                "the connection string has no key but a signature: use that signature"
            )
        resource = f"http://{endpoint.host}/{(entity or endpoint.entity or '').strip('/')}"
        expires_s = int(time.time()) + parse_duration_ms(expires) // 1_000
        typer.echo(make_token(resource, endpoint.rule, endpoint.key, expires_s))
