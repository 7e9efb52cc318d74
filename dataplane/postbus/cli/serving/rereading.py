"""Rereading of manifests and Secrets on SIGHUP.

`running` starts it with the bus. A mistake in the manifests is logged and changes nothing. A signal
during the start, during a reread or after a failure is not lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from postbus.assembly.bus import Bus, BusError
from postbus.contract.yaml_documents import ManifestError
from postbus.manifests.reader import BusDefinition
from postbus.process.data_directory import DataDirectoryError
from postbus.process.settings import SettingsError

logger = logging.getLogger(__name__)


class Rereading:
    """Rereads the manifests of one bus on request."""

    def __init__(self, read: Callable[[], BusDefinition]) -> None:
        self._read = read
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Request a reread; safe to call from a signal handler."""
        self._asked.set()

    async def follow(self, bus: Bus) -> None:
        """Serve requests for a running bus, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                await bus.redefine(await asyncio.to_thread(self._read))
            except (ManifestError, SettingsError, BusError, DataDirectoryError, OSError) as error:
                logger.error("manifests were not read again", extra={"why": str(error)})
            except Exception:  # a supervised boundary: the next signal is handled all the same
                logger.exception("manifests were not read again")
            else:
                logger.info("manifests were read again")
