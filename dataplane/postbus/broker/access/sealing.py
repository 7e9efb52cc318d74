"""Seals what must be recoverable and must not be readable in the database: SAS keys (ADR 31).

AES-256-GCM under a key that lies outside the database; each text is bound to the place it was
sealed for, so that a row copied to another rule does not open there.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
CHECK: Final = b"postbus sealing key"


class SealBroken(Exception):
    """A sealed text does not open: it was sealed with another key, or for another place."""


class KeySeal:
    """Seals and opens texts with one key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a sealing key has {KEY_BYTES} bytes, this one {len(key)}")
        self._cipher = AESGCM(key)
        self.check = hmac.digest(key, CHECK, "sha256")
        """Tells this key from another one, and nothing else about it."""

    @classmethod
    def from_text(cls, text: str) -> KeySeal:
        """Read a key in base64, as `openssl rand -base64 32` prints it; raises ValueError."""
        try:
            return cls(base64.b64decode(text.strip(), validate=True))
        except binascii.Error as error:
            raise ValueError("a sealing key is base64 of 32 bytes") from error

    def seal(self, text: str, place: str) -> bytes:
        """Return nonce and ciphertext of a text."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, text.encode(), place.encode())

    def open(self, sealed: bytes, place: str) -> str:
        """Return the text that was sealed for this place; raises `SealBroken`."""
        nonce, ciphertext = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, ciphertext, place.encode()).decode()
        except (InvalidTag, ValueError) as error:
            raise SealBroken("it was sealed with another key") from error
