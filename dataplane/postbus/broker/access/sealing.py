"""Encryption of SAS keys, which must be recoverable but not readable in the database (ADR 31).

AES-256-GCM with a key outside the database; each text is bound to its place, so that a row copied
to another rule cannot be decrypted there.
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
    """A text cannot be decrypted: it was sealed with another key, or for another place."""


class KeySeal:
    """Encrypts and decrypts texts with one key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a sealing key must have {KEY_BYTES} bytes, this one has {len(key)}")
        self._cipher = AESGCM(key)
        self.check = hmac.digest(key, CHECK, "sha256")
        """Fingerprint that identifies this key and reveals nothing else about it."""

    @classmethod
    def from_text(cls, text: str) -> KeySeal:
        """Read a key in base64, as `openssl rand -base64 32` prints it; raises ValueError."""
        try:
            return cls(base64.b64decode(text.strip(), validate=True))
        except binascii.Error as error:
            raise ValueError("a sealing key must be base64 of 32 bytes") from error

    def seal(self, text: str, place: str) -> bytes:
        """Return nonce and ciphertext of a text."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, text.encode(), place.encode())

    def open(self, sealed: bytes, place: str) -> str:
        """Return the text sealed for this place; raises `SealBroken`."""
        nonce, ciphertext = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, ciphertext, place.encode()).decode()
        except (InvalidTag, ValueError) as error:
            raise SealBroken("it was sealed with another key") from error
