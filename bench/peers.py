"""The brokers Postbus is compared with: RabbitMQ 3 and 4 with a quorum queue, Artemis on AIO.

All run from a directory of the benchmark on ports of their own, with configuration written here;
a broker of the same kind that runs on the machine as a service is neither used nor disturbed.
bench/README.md describes their installation.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from server import LOOPBACK, BenchError, Server, port_answers

# Messages larger than its credit settings starve Artemis' sender; stock values are 1000 and 300,
# these are in its favour.
_ARTEMIS_CREDITS = {"amqpCredits": 5000, "amqpLowCredits": 2500}
# What `artemis create` finds out about the disk on a calm machine. Fixed, because what it finds
# on a busy one would differ from run to run.
_ARTEMIS_BUFFER_TIMEOUT_NS = 8000
_ARTEMIS_HEAP = "-Xms2G -Xmx4G"

_RABBITMQ_LIBRARY = Path("/usr/lib/rabbitmq")  # where Debian's package puts it

# The mounts belong to the namespace of the process and end with it. Erlang reads the processors
# from /sys to bind its threads.
_ENTER_ROOT = """
root=$1 work=$2
shift 2
for folder in dev proc sys; do mount --rbind "/$folder" "$root/$folder"; done
mount --rbind "$work" "$root/mnt"
exec /usr/sbin/chroot "$root" "$@"
"""


class RabbitMQ(Server):
    """Debian's rabbitmq-server with the rabbitmq_amqp1_0 plugin; all queues are quorum queues."""

    key = "rabbitmq"
    title = "RabbitMQ 3 quorum"
    user = "guest"
    password = "guest"  # RabbitMQ's own default, good for loopback only
    plugins = "rabbitmq_amqp1_0"
    library = _RABBITMQ_LIBRARY

    def __init__(self, directory: Path, port: int, queues: list[str]) -> None:
        super().__init__(directory, port)
        self.queues = queues
        self._node = f"postbus-bench-{port}@localhost"
        self._epmd: subprocess.Popen[bytes] | None = None

    def missing(self) -> str | None:
        """Return the name of the missing Debian package."""
        return None if self._is_installed() else "apt-get install rabbitmq-server"

    def version(self) -> str:
        """Read it from the name of the installed library."""
        found = sorted(self.library.glob("lib/rabbitmq_server-*"))
        code = "io:put_chars(erlang:system_info(otp_release)),halt()."
        release = subprocess.run(
            [*self._prefix(), "erl", "-noshell", "-eval", code],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        return f"{found[-1].name.rpartition('-')[2]}, OTP {release}"

    def prepare(self, *, fresh: bool) -> None:
        """Write the configuration; epmd is ours too, so that none stays behind."""
        if fresh:
            shutil.rmtree(self.directory / "data", ignore_errors=True)
        for folder in ("data", "log", "home"):
            (self.directory / folder).mkdir(exist_ok=True)
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = {LOOPBACK}:{self.port}\n"
            # Only a backlog larger than memory would reach these; then they are the truth.
            "disk_free_limit.absolute = 1GB\n"
            # The default of RabbitMQ 3; that of 4 is below the largest body of a row.
            "max_message_size = 134217728\n"
        )
        (self.directory / "enabled_plugins").write_text(f"[{self.plugins}].\n")
        if self._epmd is None:
            self._start_epmd()

    def environment(self) -> dict[str, str]:
        """Return settings that move every file and port away from the system's RabbitMQ."""
        directory = self._directory_inside()
        return {
            "HOME": str(directory / "home"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_CONF_ENV_FILE": str(directory / "none.conf"),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_DIST_PORT": str(self.port + 2),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self.port + 1),
            "ERL_EPMD_ADDRESS": LOOPBACK,
        }

    def command(self) -> list[str]:
        """Run the script below Debian's wrapper, which would change user and directories."""
        return [*self._prefix(), str(_RABBITMQ_LIBRARY / "bin/rabbitmq-server")]

    def after_start(self) -> None:
        """Declare the queues. The port opens before the node is wholly up, hence the patience."""
        code = "".join(
            f'rabbit_amqqueue:declare(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>), true, false, '
            '[{<<"x-queue-type">>, longstr, <<"quorum">>}], none, <<"guest">>), '
            for queue in self.queues
        )
        code += "ok."
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(
                [*self._prefix(), str(_RABBITMQ_LIBRARY / "bin/rabbitmqctl"), "eval", code],
                env={**os.environ, **self.environment()},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise BenchError(f"{self.title}: no queues: {done.stderr.strip()[-300:]}")
            time.sleep(0.5)

    def stop(self, limit_s: float = 60) -> None:
        """Stop the node, then our epmd."""
        super().stop(limit_s)
        if self._epmd is not None:
            self._epmd.terminate()
            self._epmd.wait()
            self._epmd = None

    def address(self, queue: str) -> str:
        """Name an existing queue, past the exchanges. Source: README of rabbitmq_amqp1_0."""
        return f"/amq/queue/{queue}"

    def _is_installed(self) -> bool:
        return (self.library / "bin/rabbitmq-server").exists()

    def _prefix(self) -> list[str]:
        """Return the start of every command line, up to the program of the broker."""
        return []

    def _directory_inside(self) -> Path:
        """Return the directory of the benchmark as the broker sees it."""
        return self.directory

    def _start_epmd(self) -> None:
        """Start it before the node, which would otherwise start one that stays."""
        port = self.port + 1
        if port_answers(port):
            raise BenchError(f"port {port} for {self.title} is in use; see --base-port")
        self._epmd = subprocess.Popen(
            [*self._prefix(), "epmd", "-port", str(port), "-address", LOOPBACK],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while not port_answers(port):
            if self._epmd.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{self.title}: epmd did not open port {port}")
            time.sleep(0.005)


class RabbitMQ4(RabbitMQ):
    """rabbitmq-server of Debian 13 in a root directory of its own; its AMQP 1.0 is no plugin.

    A user namespace gives the right to mount and to change the root to everyone, not only root.
    """

    key = "rabbitmq4"
    title = "RabbitMQ 4 quorum"
    plugins = ""
    root = Path(os.environ.get("RABBITMQ4_ROOT", "/var/tmp/trixie"))
    library = root / _RABBITMQ_LIBRARY.relative_to("/")

    def missing(self) -> str | None:
        """Return the place of the missing root."""
        if self._is_installed():
            return None
        return f"a Debian 13 root in {self.root} (bench/README.md names the commands)"

    def address(self, queue: str) -> str:
        """Name a queue by the second version of addresses. Source: rabbitmq.com/docs/amqp."""
        return f"/queues/{queue}"

    def _prefix(self) -> list[str]:
        enter = ["unshare", "--mount", "--map-root-user", "sh", "-ec", _ENTER_ROOT, "sh"]
        return [*enter, str(self.root), str(self.directory)]

    def _directory_inside(self) -> Path:
        return Path("/mnt")


class Artemis(Server):
    """ActiveMQ Artemis with journal type ASYNCIO and journal-datasync, from its distribution."""

    key = "artemis"
    title = "Artemis AIO"

    def __init__(self, directory: Path, port: int, queues: list[str]) -> None:
        super().__init__(directory, port)
        self.queues = queues

    def missing(self) -> str | None:
        """Return the missing part: Java, libaio or the distribution."""
        if shutil.which("java") is None:
            return "apt-get install openjdk-17-jre-headless"
        if ctypes.util.find_library("aio") is None:
            return "apt-get install libaio1"
        if self._archive() is None and "ARTEMIS_HOME" not in os.environ:
            return "the Artemis distribution (bench/README.md names the Maven command)"
        return None

    def version(self) -> str:
        """Read it from the name of the distribution."""
        java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
        runtime = re.search(r'"([^"]+)"', java.stderr)
        name = self._home().name.rpartition("-")[2]
        return f"{name}, Java {runtime[1] if runtime else 'unknown'}"

    def prepare(self, *, fresh: bool) -> None:
        """Create the instance once; `fresh` throws its data away, not its configuration."""
        instance = self.directory / "instance"
        if fresh:
            shutil.rmtree(instance / "data", ignore_errors=True)
        if not (instance / "etc/broker.xml").exists():
            shutil.rmtree(instance, ignore_errors=True)
            self._create(instance)
        for folder in ("data", "tmp", "log"):
            (instance / folder).mkdir(exist_ok=True)

    def command(self) -> list[str]:
        """Return the instance's own script, which becomes the Java process."""
        return [str(self.directory / "instance/bin/artemis"), "run"]

    def _create(self, instance: Path) -> None:
        options = ["--user", "bench", "--password", "bench", "--allow-anonymous", "--silent"]
        options += ["--aio", "--no-web", "--no-autotune", "--no-amqp-acceptor"]
        options += ["--no-hornetq-acceptor", "--no-mqtt-acceptor", "--no-stomp-acceptor"]
        options += ["--host", LOOPBACK, "--default-port", str(self.port)]
        options += ["--queues", ",".join(self.queues)]
        created = subprocess.run(
            [str(self._home() / "bin/artemis"), "create", str(instance), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if created.returncode != 0:
            raise BenchError(f"Artemis: no instance: {(created.stdout + created.stderr)[-300:]}")
        _tune(instance / "etc/broker.xml", instance / "etc/artemis.profile")

    def _home(self) -> Path:
        """Return the unpacked distribution; unpack it when only the archive is there."""
        if "ARTEMIS_HOME" in os.environ:
            return Path(os.environ["ARTEMIS_HOME"])
        archive = self._archive()
        if archive is None:
            raise BenchError("the Artemis distribution is not installed")
        home = self.directory / re.sub(r"-bin\.(tar\.gz|zip)$", "", archive.name)
        if not (home / "bin/artemis").exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.unpack_archive(archive, self.directory)
            (home / "bin/artemis").chmod(0o755)
        return home

    @staticmethod
    def _archive() -> Path | None:
        """Find the newest distribution in Maven's local repository."""
        repository = Path.home() / ".m2/repository/org/apache"
        found = [
            path
            for group in ("artemis", "activemq")  # the group's name changed in 2.50
            for path in repository.glob(f"{group}/apache-artemis/*/apache-artemis-*-bin.*")
            if path.name.endswith(("-bin.tar.gz", "-bin.zip"))
        ]
        return max(found, key=_release_of, default=None)


def _release_of(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _tune(broker_xml: Path, profile: Path) -> None:
    """Apply the settings of the module docstring; refuse to measure without fsync."""
    text = broker_xml.read_text()
    for name, value in _ARTEMIS_CREDITS.items():
        text = re.sub(rf"{name}=\d+", f"{name}={value}", text)
    timeout = f"<journal-buffer-timeout>{_ARTEMIS_BUFFER_TIMEOUT_NS}</journal-buffer-timeout>"
    # The instance is created without its own idea of the time-out, so that this one stands alone.
    text = text.replace("<journal-min-files>", f"{timeout}\n      <journal-min-files>", 1)
    for line in (timeout, "<journal-datasync>true<", "<journal-type>ASYNCIO<"):
        if line not in text:
            raise BenchError(f"Artemis: configuration without {line}")
    broker_xml.write_text(text)
    profile.write_text(re.sub(r"-Xms\S+ -Xmx\S+", _ARTEMIS_HEAP, profile.read_text()))
