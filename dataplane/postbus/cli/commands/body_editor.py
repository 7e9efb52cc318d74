"""Editing of a dead letter's body: it is read, changed in a file by an editor, and returned.

The file is private and deleted with the command; the content after the editor ended is sent.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from postbus.cli.client.control_client import ControlClient, run_with
from postbus.cli.client.message_pages import ask
from postbus.cli.failures import InputError, RefusedError
from postbus.contract.control_messages import MAX_SHOWN_BYTES

if TYPE_CHECKING:
    from postbus.cli.client.contexts import BusAddress
    from postbus.cli.client.message_pages import Selection

ENDINGS: Final = {"json": ".json", "xml": ".xml", "html": ".html", "yaml": ".yaml"}
"""Word in a content type -> file extension for the editor."""


def edited_body(target: BusAddress, selection: Selection, number: int) -> bytes:
    """Return the new body of a message. Raises `RefusedError`, `InputError` or `typer.Exit`."""
    message = run_with(target, lambda control: _read(control, selection, number))
    before = _body_of(message, number)
    content_type = str(message.get("contentType") or "").lower()
    ending = next((each for word, each in ENDINGS.items() if word in content_type), ".txt")
    with tempfile.TemporaryDirectory(prefix="postbus-") as folder:  # readable only by its owner
        path = Path(folder) / f"{number}{ending}"
        path.write_bytes(before)
        _edit(path)
        after = path.read_bytes()
    if not before.endswith(b"\n"):
        after = after.removesuffix(b"\n")  # editors add a newline at the end
    if after == before:
        raise InputError("the body was not changed: nothing was sent")
    return after


async def _read(control: ControlClient, selection: Selection, number: int) -> dict[str, Any]:
    asked = selection.body(fromNumber=number, count=1, bodyBytes=MAX_SHOWN_BYTES)
    page = await ask(control, "peek", asked)
    for message in page["messages"]:
        if int(message["sequenceNumber"]) == number:
            return dict(message)
    raise RefusedError(f"{number}: no such dead letter in {selection.entity}")


def _body_of(message: dict[str, Any], number: int) -> bytes:
    body = base64.b64decode(message.get("bodyBase64") or "")
    if int(message["bodyBytes"]) > len(body):
        raise InputError(f"{number}: the body is too large for an editor; use --body-file")
    return body


def _edit(path: Path) -> None:
    """Run the editor and wait for its end."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.run([*shlex.split(command), str(path)], check=False).returncode
    except (OSError, ValueError) as error:
        raise InputError(f"{command}: {error}; set EDITOR") from None
    if code != 0:
        typer.echo(f"postbus: {command} exited with {code}: nothing was sent", err=True)
        raise typer.Exit(1)
