#!/usr/bin/env python3
"""Run Postgres as the managed store of a bus: `postbus-store --max-connections 100`.

Process 1 of the image `postbus-store`, with the standard library only. It makes the cluster at the
first start, keeps the password and the certificate of the server like the mounted Secrets, and
stops the server in order on SIGTERM.

The volume has `15/data`, the cluster of Postgres 15, so that one of another major version can stand
beside it, and `15/lock`, which all processes of a server hold.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

MAJOR: Final = 15
BINARIES: Final = Path(f"/usr/lib/postgresql/{MAJOR}/bin")
HERE: Final = Path(__file__).resolve().parent
USER: Final = "postbus"
SUPERUSER: Final = "postgres"

POLL_S: Final = 2.0
"""Period after which the Secrets are read; the kubelet itself renews them once a minute."""
STARTING_POLL_S: Final = 0.1
LOCK_POLL_S: Final = 1.0
QUERY_S: Final = 10.0
UNUSABLE: Final = 78
"""Exit code of what only a change of the pod or the volume repairs (EX_CONFIG)."""

LOG_BYTES: Final = (64 << 20, 1 << 30)
"""Limits of the write-ahead log. It has one size, so that its files are soon only reused: creating
one stops all commits for some 50 ms."""
RESERVE_BYTES: Final = 64 << 20
"""Space for a recovery, which may need three files of the log. On a full volume Postgres refuses
rows, but ends in panic when its log finds no room, even if messages are only read."""
ROOM_BYTES: Final = 16 << 20
"""Space that the reserve leaves to others."""
SCRAM_ROUNDS: Final = 4096

MEMORY_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of the container, in control groups of version 2 and 1."""
BUFFER_BYTES: Final = (32 << 20, 4 << 30)
BUFFER_BYTES_UNLIMITED: Final = 256 << 20


class Unusable(Exception):
    """The store cannot run; the text says why, and what to do."""


class StopRequested(Exception):
    """SIGTERM came before the server ran."""


class QueryFailed(Exception):
    """A program of Postgres did not do its work; the text is its own."""


def log(text: str) -> None:
    """Write a line to standard error, where the server logs."""
    sys.stderr.write(f"postbus-store: {text}\n")


# --- signals ------------------------------------------------------------------------------------

HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def next_signal(seconds: float) -> int | None:
    """Return the next handled signal, None if there is none in time. They are always blocked."""
    info = signal.sigtimedwait(HANDLED, seconds)
    return None if info is None else info.si_signo


def spawn(
    command: Sequence[Path | str], *, inherited: Sequence[int] = (), output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that gets its signals; `output` takes both of its outputs."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=inherited,
        preexec_fn=_unblock_signals,  # noqa: PLW1509 - this process has one thread
    )


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)


# --- volume -------------------------------------------------------------------------------------


class Volume:
    """The folder of the volume: cluster, lock and reserve."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / str(MAJOR)
        self.data = self.home / "data"
        self.reserve = self.home / "reserve"
        self._lock_fd = -1

    def check_version(self) -> None:
        """Refuse data of another major version, which this server cannot read."""
        found = {}
        for path in (self.data, *sorted(self.root.glob("[0-9]*/data"))):
            version = path / "PG_VERSION"
            if version.is_file():
                found[path] = version.read_text(encoding="ascii").strip()
        if found and found.get(self.data) != str(MAJOR):
            path, made_by = next(iter(found.items()))
            raise Unusable(
                f"{path} was made by Postgres {made_by}, this image runs {MAJOR}: go back to an"
                f" image of Postgres {made_by}, or move the data to {self.data} with pg_upgrade,"
                " or with pg_dump and pg_restore"
            )

    def make_home(self) -> None:
        """Make the folder of this version."""
        try:
            self.home.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise Unusable(
                f"{self.home} cannot be made: {error.strerror}; mount a volume at {self.root} that"
                f" user {os.geteuid()} may write, as with fsGroup {os.getegid()}, and that has room"
            ) from error

    def lock(self) -> int:
        """Wait until no other server uses the data; return the lock, which the server inherits.

        On the same node a replaced pod may still be stopping.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock_fd = os.open(self.home / "lock", flags, 0o600)
        is_waiting = False
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._lock_fd
            except BlockingIOError:
                if not is_waiting:
                    log(f"waiting: another server uses {self.data}")
                is_waiting = True
            if next_signal(LOCK_POLL_S) in {signal.SIGTERM, signal.SIGINT}:
                raise StopRequested

    def log_bytes(self) -> int:
        """Return the size of the log: an eighth of the volume, within the limits."""
        state = os.statvfs(self.root)
        least, most = LOG_BYTES
        return max(least, min(most, state.f_blocks * state.f_frsize // 8))

    def free_bytes(self) -> int:
        """Return the space left to this user."""
        state = os.statvfs(self.root)
        return state.f_bavail * state.f_frsize

    def release_reserve(self) -> bool:
        """Give the reserve back if the volume is full; return whether there was one."""
        if self.free_bytes() >= RESERVE_BYTES or not self.reserve.exists():
            return False
        log(f"the volume is full, {self.free_bytes() >> 20} MiB are free: enlarge it")
        self.reserve.unlink()
        return True

    def fill_reserve(self) -> None:
        """Reserve what is missing, as far as there is room."""
        has = self.reserve.stat().st_size if self.reserve.exists() else 0
        wanted = min(RESERVE_BYTES, has + self.free_bytes() - ROOM_BYTES)
        if wanted <= has:
            return
        try:
            with self.reserve.open("ab") as file:
                os.posix_fallocate(file.fileno(), has, wanted - has)
        except OSError as error:
            raise Unusable(f"no space could be reserved on the volume: {error.strerror}") from error


# --- memory -------------------------------------------------------------------------------------


def buffer_bytes(limits: Sequence[Path] = MEMORY_LIMITS) -> int:
    """Return the memory for pages: a quarter of the container's limit, as Postgres recommends."""
    for path in limits:
        try:
            limit = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 has a number of nearly 64 bits for no limit.
        if limit.isdigit() and int(limit) < 1 << 60:
            least, most = BUFFER_BYTES
            return max(least, min(most, int(limit) // 4))
    return BUFFER_BYTES_UNLIMITED


# --- password -----------------------------------------------------------------------------------


def read_password(path: Path) -> str:
    """Return the password of a file, without the end of its line."""
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"{path} cannot be read: {error}") from error
    if not password or not password.isascii() or not password.isprintable():
        raise Unusable(f"{path} has no password of printable ASCII characters")
    return password


def scram_verifier(password: str, salt: bytes, rounds: int = SCRAM_ROUNDS) -> str:
    """Return what Postgres stores of a password (RFC 5803), so that no statement contains it."""
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    first, second, third = (base64.b64encode(each).decode() for each in (salt, stored, server))
    return f"SCRAM-SHA-256${rounds}:{first}${second}:{third}"


def is_verifier_of(password: str, verifier: str) -> bool:
    """Return whether a role that has this verifier accepts this password."""
    found = re.fullmatch(r"SCRAM-SHA-256\$(\d+):([\w+/=]+)\$[\w+/=]+:[\w+/=]+", verifier)
    if found is None:
        return False
    salt = base64.b64decode(found[2])
    return hmac.compare_digest(scram_verifier(password, salt, int(found[1])), verifier)


# --- certificate --------------------------------------------------------------------------------


class Certificate(NamedTuple):
    """Certificate and key of the server."""

    chain: Path
    key: Path

    def digest(self) -> bytes:
        """Return a digest of the files, which changes with them; empty if one is missing."""
        try:
            contents = [path.read_bytes() for path in self]
        except OSError:
            return b""
        return hashlib.sha256(b"\0".join(contents)).digest()

    def check(self) -> None:
        """Refuse files that the server could not load."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.chain, self.key, password=_refuse_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise Unusable(f"{self.chain} and {self.key.name} cannot be used: {error}") from error


def _refuse_password() -> NoReturn:
    raise ValueError("the key is encrypted")


# --- server -------------------------------------------------------------------------------------


class Server:
    """One Postgres, and what it has to follow while it runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.volume = Volume(options.volume)
        self.certificate = Certificate(
            options.tls_folder / "tls.crt", options.tls_folder / "tls.key"
        )
        self.password_file = options.auth_folder / "password"
        self.sockets: Path = options.socket_folder
        self.prepared = self.sockets / "prepared"
        """Mark that the probes look for."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_recovering = False
        """The reserve was released for a server that had ended, or was about to."""

        self._lock = -1
        self._password = ""
        self._digest = b""
        self._complaints: dict[str, str] = {}

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the cluster if there is none, and run the server."""
        os.umask(0o077)
        self.certificate.check()
        read_password(self.password_file)
        self.volume.check_version()
        self.volume.make_home()
        self._lock = self.volume.lock()
        self._expect_start()
        self.volume.release_reserve()
        if not self.volume.data.exists():
            self._make_cluster()
        # The kubelet gives the group of a volume the rights of its owner (fsGroup); Postgres
        # refuses that.
        self.volume.data.chmod(0o700)
        self._launch()

    def _expect_start(self) -> None:
        """Tell the probes that nothing is served, and look often until it is."""
        self._password = ""
        self.prepared.unlink(missing_ok=True)

    def _launch(self) -> None:
        # Nobody else has the lock: these are of a server that was killed, and in a container
        # another process soon has its number.
        for remains in (
            self.volume.data / "postmaster.pid",
            self.sockets / f".s.PGSQL.{self.options.port}.lock",
            self.sockets / f".s.PGSQL.{self.options.port}",
        ):
            remains.unlink(missing_ok=True)
        self._digest = self.certificate.digest()
        self._process = spawn(
            [BINARIES / "postgres", "-D", self.volume.data, *self._settings()],
            inherited=[self._lock],
        )

    def _settings(self) -> list[str]:
        log_size = f"{self.volume.log_bytes() >> 20}MB"
        settings = {
            "config_file": HERE / "postgresql.conf",
            "hba_file": HERE / "pg_hba.conf",
            "listen_addresses": self.options.listen_addresses,
            "port": self.options.port,
            "unix_socket_directories": self.sockets,
            "ssl_cert_file": self.certificate.chain,
            "ssl_key_file": self.certificate.key,
            "max_connections": self.options.max_connections,
            "shared_buffers": self.options.shared_buffers or f"{buffer_bytes() >> 20}MB",
            "min_wal_size": log_size,
            "max_wal_size": log_size,
        }
        return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

    def _make_cluster(self) -> None:
        """Make it beside the final place, so that a killed start leaves no incomplete one.

        Role and database are there before the server listens: a refused login would end a bus.
        """
        making = self.volume.home / "data.making"
        shutil.rmtree(making, ignore_errors=True)
        log(f"making a cluster of Postgres {MAJOR}")
        try:
            _run_initdb(making)
            self._make_database(making)
        except QueryFailed as error:
            shutil.rmtree(making, ignore_errors=True)
            free = f"{self.volume.free_bytes() >> 20} MiB are free"
            raise Unusable(f"no cluster could be made, {free}: {error}") from error
        making.rename(self.volume.data)
        folder = os.open(self.volume.home, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)

    def _make_database(self, making: Path) -> None:
        """Make role and database while no server runs on the cluster."""
        password = scram_verifier(read_password(self.password_file), secrets.token_bytes(16))
        done = subprocess.run(
            [BINARIES / "postgres", "--single", "-D", making, "postgres"],
            input=f"create role {USER} login password '{password}'\n"
            f"create database {USER} owner {USER}\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode or " ERROR: " in done.stdout:
            raise QueryFailed(" ".join(done.stdout.split())[-1000:])

    # --- while it runs ----------------------------------------------------------------------------

    def supervise(self) -> int:
        """Follow the Secrets until the server ends; return its exit code."""
        assert self._process is not None
        while True:
            came = next_signal(self.options.poll_s if self.prepared.exists() else STARTING_POLL_S)
            if came in {signal.SIGTERM, signal.SIGINT}:
                return self.stop()
            code = self._process.poll()
            if code is not None:
                self._expect_start()
                if not (self.volume.release_reserve() or self._is_recovering):
                    return code if code > 0 else 1
                self._is_recovering = False
                self._launch()
            if came == signal.SIGCHLD:  # a program that was waited for
                continue
            self._guarded(self._follow_certificate)
            self._guarded(self._follow_password)
            self._guarded(self._follow_room)

    def stop(self) -> int:
        """End the sessions, write a checkpoint, and return the server's exit code.

        However long the checkpoint takes: the kubelet kills what outlasts the grace period, and
        the next start recovers.
        """
        assert self._process is not None
        log("stopping")
        self.prepared.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGINT)
        return self._process.wait()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step, again in the next round if it fails; log each reason once."""
        complaint = ""
        try:
            step()
        except (Unusable, QueryFailed) as error:
            complaint = str(error)
        if complaint and complaint != self._complaints.get(step.__name__):
            log(complaint)
        self._complaints[step.__name__] = complaint

    def _follow_certificate(self) -> None:
        """Let the server load the files when they have changed; it keeps the former ones if not."""
        assert self._process is not None
        digest = self.certificate.digest()
        if digest == self._digest:
            return
        self.certificate.check()
        self._process.send_signal(signal.SIGHUP)
        self._digest = digest
        log("the certificate has changed and is loaded")

    def _follow_password(self) -> None:
        """Give the role the password of the file.

        Nothing is written if it has it: a full volume still serves receivers.
        """
        password = read_password(self.password_file)
        if password == self._password or not self._is_answering():
            return
        found = self._query(f"select rolpassword from pg_authid where rolname = '{USER}'")
        if not is_verifier_of(password, found):
            verifier = scram_verifier(password, secrets.token_bytes(16))
            self._query(f"alter role {USER} password '{verifier}'")
            log("the password has changed and is set")
        self._password = password
        self.prepared.touch()

    def _follow_room(self) -> None:
        """Let a server recover that ended in panic on a full volume; else keep the reserve.

        While a server starts, it may need what is free for its recovery.
        """
        is_full = self.volume.free_bytes() < ROOM_BYTES
        if is_full and not self._is_answering():
            self._is_recovering |= self.volume.release_reserve()
            self._expect_start()
        elif self.prepared.exists():
            self.volume.fill_reserve()
            self._is_recovering = False

    def _is_answering(self) -> bool:
        done = subprocess.run(
            [BINARIES / "pg_isready", "--quiet", *self._address()],
            check=False,
        )
        return done.returncode == 0

    def _query(self, statement: str) -> str:
        """Return what a statement of the superuser prints; it goes over standard input."""
        limit = f"-c statement_timeout={int(QUERY_S * 1000)}"
        done = subprocess.run(
            [
                BINARIES / "psql",
                *self._address(),
                "--no-psqlrc",
                "--quiet",
                "--tuples-only",
                "--no-align",
                "--set=ON_ERROR_STOP=1",
            ],
            input=statement,
            capture_output=True,
            text=True,
            env={**os.environ, "PGOPTIONS": limit, "PGCONNECT_TIMEOUT": f"{QUERY_S:.0f}"},
            check=False,
        )
        if done.returncode:
            raise QueryFailed(" ".join(done.stderr.split()))
        return done.stdout.strip()

    def _address(self) -> list[str]:
        return [
            f"--host={self.sockets}",
            f"--port={self.options.port}",
            f"--username={SUPERUSER}",
            "--dbname=postgres",
        ]


def _run_initdb(folder: Path) -> None:
    """Make an empty cluster in a folder; stop on SIGTERM."""
    with tempfile.TemporaryFile() as output:
        process = spawn(
            [
                BINARIES / "initdb",
                f"--pgdata={folder}",
                f"--username={SUPERUSER}",
                "--encoding=UTF8",
                "--no-locale",
                "--data-checksums",
                "--auth=reject",  # pg_hba.conf of the image applies
                "--no-instructions",
            ],
            output=output.fileno(),
        )
        while process.poll() is None:
            if next_signal(STARTING_POLL_S) in {signal.SIGTERM, signal.SIGINT}:
                process.terminate()
                process.wait()
                raise StopRequested
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode:
        raise QueryFailed(" ".join(said.split())[-1000:])


# --- command ------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="postbus-store", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--max-connections", type=int, required=True, metavar="N")
    parser.add_argument(
        "--shared-buffers", metavar="SIZE", help="default: a quarter of the memory limit"
    )
    parser.add_argument("--volume", type=Path, default=Path("/var/lib/postbus-store"))
    parser.add_argument("--tls-folder", type=Path, default=Path("/etc/postbus-store/tls"))
    parser.add_argument("--auth-folder", type=Path, default=Path("/etc/postbus-store/auth"))
    parser.add_argument("--socket-folder", type=Path, default=Path("/run/postgresql"))
    parser.add_argument("--listen-addresses", default="*")
    parser.add_argument("--port", type=int, default=5432)
    parser.add_argument("--poll-s", type=float, default=POLL_S, metavar="SECONDS")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the server until it ends or SIGTERM comes; return the exit code."""
    options = parse(sys.argv[1:])
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    server = Server(options)
    try:
        server.start()
        return server.supervise()
    except StopRequested:
        return 0
    except Unusable as error:
        log(str(error))
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
