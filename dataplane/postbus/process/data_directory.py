"""The folder of one local bus: its lock, its generated keys, its certificates, its Postgres.

The assembly opens it first and closes it last. Everything in it is for the owner only. It must
never be shared: two processes on one embedded Postgres would damage it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import secrets
from pathlib import Path
from types import TracebackType

from postbus.manifests.reader import RuleKeys
from postbus.process.local_bus import FILE_NAME, Announcement
from postbus.process.private_file import write_private

KEY_BYTES = 32  # as long as the keys that Azure makes

CONTROL_TOKEN_NAME = "control.token"
"""The file in a data directory that lets callers use the control API."""


class DataDirectoryError(Exception):
    """The folder cannot be used."""


class DataDirectoryInUse(DataDirectoryError):
    """Another process uses the folder."""

    def __init__(self, path: Path, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"data directory {path} is in use by process {holder}:"
            " stop it, or choose another with --data"
        )


class DataDirectory:
    """An open data directory; a context manager that holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.postgres = self.path / "postgres"
        self.certificates = self.path / "tls"
        self.control_token_file = self.path / CONTROL_TOKEN_NAME
        self._keys_file = self.path / "keys.json"
        self._announcement_file = self.path / FILE_NAME
        self._lock_fd: int | None = None

    def open(self) -> None:
        """Create the folder if needed and lock it; raises `DataDirectoryError`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not any(self.path.iterdir()):
                self.path.chmod(0o700)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = (error.strerror or "cannot be used").lower()
            raise DataDirectoryError(f"data directory {self.path}: {reason}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise DataDirectoryInUse(self.path, holder or "unknown") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock_fd = descriptor
        self._withdraw()  # left by a bus that was killed

    def close(self) -> None:
        """Release the lock."""
        if self._lock_fd is not None:
            self._withdraw()
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> DataDirectory:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def lock_identity(self) -> str:
        """Device and inode of the locked file, which identify the folder on this machine."""
        if self._lock_fd is None:
            return ""
        found = os.fstat(self._lock_fd)
        return f"{found.st_dev}:{found.st_ino}"

    def announce(self, announcement: Announcement) -> None:
        """Publish the address of the bus for commands with this folder, until it is closed."""
        announcement.write(self._announcement_file)

    def _withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._announcement_file.unlink(missing_ok=True)

    def keys_of(self, rule_path: str) -> RuleKeys:
        """Return the generated keys of a rule such as `shop-bus/orders/reader`; they are generated
        once.

        Raises `DataDirectoryError` when the file of keys cannot be read.
        """
        known = self._read_keys()
        if rule_path not in known:
            known[rule_path] = [new_key(), new_key()]
            write_private(self._keys_file, json.dumps(known, indent=1).encode())
        primary, secondary = known[rule_path]
        return RuleKeys(primary, secondary)

    def keep_keys(self, rule_path: str, primary: str, secondary: str) -> None:
        """Replace generated keys; raises like `keys_of`, and OSError."""
        known = self._read_keys()
        known[rule_path] = [primary, secondary]
        write_private(self._keys_file, json.dumps(known, indent=1).encode())

    def sealing_key(self) -> str:
        """Return the generated key that seals other keys in the store; it is generated once."""
        file = self.path / "sealing.key"
        try:
            if not file.exists():
                write_private(file, new_key().encode())
            return file.read_text(encoding="ascii")
        except (OSError, ValueError) as error:
            raise DataDirectoryError(f"{file} cannot be read: repair it") from error

    def ensure_control_token(self) -> Path:
        """Return the file of control tokens; create one if there is none.

        Raises `DataDirectoryError` when it cannot be written.
        """
        try:
            if not self.control_token_file.exists():
                token = secrets.token_urlsafe(KEY_BYTES)
                write_private(self.control_token_file, f"{token}\n".encode("ascii"))
        except OSError as error:
            reason = (error.strerror or "cannot be written").lower()
            raise DataDirectoryError(f"{self.control_token_file}: {reason}") from error
        return self.control_token_file

    def _read_keys(self) -> dict[str, list[str]]:
        try:
            known = json.loads(self._keys_file.read_text(encoding="utf-8"))
            for keys in known.values():
                if [type(key) for key in keys] != [str, str]:
                    raise ValueError("a rule needs two keys")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise DataDirectoryError(
                f"{self._keys_file} cannot be read: repair it, or remove it for new keys"
            ) from error
        return dict(known)


def new_key() -> str:
    """Return a key in the form of Azure's: base64 of random bytes."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode("ascii")
