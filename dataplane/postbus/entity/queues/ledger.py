"""The accounts of a sub-queue: live messages, their share of the entity's size, loaded bytes.

Each store, load, unload and removal of a message is accounted for by one call, and nowhere else. A
body that copies of one publish share counts once in the window. All sessions of an entity use the
ledger of its active messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from postbus.entity.queues.queued_message import QueuedMessage
    from postbus.entity.window import Window
    from postbus.message.envelope import Envelope, SharedBody


class Sized(Protocol):
    """An entity with the total size of its messages."""

    size_bytes: int

    def shrink(self, size_bytes: int) -> None: ...


class Ledger:
    """See the module's docstring. `live` is the number of messages, loaded or not."""

    __slots__ = ("_entity", "_window", "live")

    def __init__(self, entity: Sized, window: Window) -> None:
        self._entity = entity
        self._window = window
        self.live = 0

    # --- stored -----------------------------------------------------------------------------------

    def store(self, count: int, size_bytes: int) -> None:
        """Account for messages that this outcome stores here, loaded or not."""
        self.live += count
        self._entity.size_bytes += size_bytes

    def restore(self, count: int) -> None:
        """Account for loaded messages; they are already included in the entity's size."""
        self.live += count

    def correct(self, size_bytes: int) -> None:
        """Account for a message that is larger than was assumed."""
        self._entity.size_bytes += size_bytes

    def resize(self, size_bytes: int) -> None:
        """Account for a loaded message that this outcome makes larger."""
        self._entity.size_bytes += size_bytes
        self._window.add(0, size_bytes)

    # --- loaded -----------------------------------------------------------------------------------

    def load(self, envelope: Envelope) -> None:
        """Account for a message that was loaded."""
        self._window.add(1, envelope.size_bytes)
        if envelope.shared is not None:
            self._window.share(envelope.shared)

    def load_all(
        self, envelopes: list[Envelope], size_bytes: int, *, is_shared: bool = False
    ) -> None:
        """Account for new messages in memory; `is_shared`: they may share bodies."""
        window = self._window
        window.add(len(envelopes), size_bytes)
        if is_shared:
            for envelope in envelopes:
                if envelope.shared is not None:
                    window.share(envelope.shared)

    def unload(self, envelope: Envelope) -> None:
        """Account for a message that was unloaded but stays stored."""
        if envelope.shared is not None:
            self._window.unshare(envelope.shared)
        self._window.remove(1, envelope.size_bytes)

    def unload_all(self, envelopes: list[Envelope]) -> None:
        """Do the same as `unload` for several."""
        window = self._window
        for envelope in envelopes:
            if envelope.shared is not None:
                window.unshare(envelope.shared)
        window.remove(len(envelopes), sum([envelope.size_bytes for envelope in envelopes]))

    # --- leaving ----------------------------------------------------------------------------------

    def leave(self, message: QueuedMessage) -> None:
        """Account for a message that this outcome settles or moves."""
        self.live -= 1
        envelope = message.envelope
        if envelope is None:
            self._entity.shrink(message.size_bytes)
        else:
            self.unload(envelope)
            self._entity.shrink(envelope.size_bytes)

    def leave_unloaded(self, size_bytes: int) -> None:
        """Account for a message that this outcome settles, with only its key in memory."""
        self.live -= 1
        self._entity.shrink(size_bytes)

    def leave_all(
        self, loaded: int, loaded_bytes: int, unloaded: int = 0, unloaded_bytes: int = 0
    ) -> None:
        """Account for messages that this outcome settles; `release` shared bodies first."""
        self.live -= loaded + unloaded
        self._entity.shrink(loaded_bytes + unloaded_bytes)
        self._window.remove(loaded, loaded_bytes)

    def release(self, body: SharedBody) -> None:
        """Account for the shared body of a loaded message that is removed with others."""
        self._window.unshare(body)
