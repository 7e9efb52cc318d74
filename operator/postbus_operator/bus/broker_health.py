"""What a broker that is not ready says of itself, on the port of its health."""

from __future__ import annotations

from typing import Final

import aiohttp

from postbus_operator.redaction import redacted

ANSWER_S: Final = 2.0
MAX_TEXT: Final = 600


async def readiness_trouble(url: str) -> str:
    """Return why a broker is not ready; "" if it is, or does not answer.

    It tells this from its first second, also while it waits for a database. `url`: of `/readyz`.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ANSWER_S)) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            text = (await answer.content.read(8 * MAX_TEXT)).decode("utf-8", "replace")
    except (aiohttp.ClientError, OSError, TimeoutError):
        return ""
    if answer.status < 400:
        return ""
    # The first line is a verdict, the next the step of a start: "waiting for the store".
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    return redacted(": ".join(lines))[:MAX_TEXT]
