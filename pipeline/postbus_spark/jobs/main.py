"""The command `postbus-pipeline`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postbus.contract.pipeline import PipelineDocument

SESSION: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of Spark that a pipeline relies on, or that suit a driver that nobody looks at."""
DESCRIPTION: Final = "Run a pipeline: messages of a bus, transformed by Spark."
QUERY_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""Loggers of Spark that write each error of a query as JSON, with the stack of Java."""

ERROR_BYTES: Final = 4_096
"""What Kubernetes keeps of an error, from the end."""

CONNECTION_HELP: Final = "a file with a connection string, instead of POSTBUS_CONNECTION_STRING"
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    given = _parser().parse_args(arguments)
    _log()
    from postbus_spark.jobs.failures import exit_code, shown

    try:
        command: Callable[[argparse.Namespace], None] = given.command
        command(given)
    except Exception as error:  # noqa: BLE001 - the code says what to do about it
        text = shown(error)
        if getattr(given, "error_file", None) is not None:
            given.error_file.write_bytes(text.encode()[:ERROR_BYTES])
        print(text, file=sys.stderr)
        return int(exit_code(error))
    return 0


def _log() -> None:
    """Log what the runner does; py4j would log each error of a batch besides."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("postbus_spark").setLevel(logging.INFO)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have the exit code of wrong configuration."""

    def error(self, message: str) -> NoReturn:
        from postbus_spark.jobs.failures import ExitCode

        self.print_usage(sys.stderr)
        self.exit(int(ExitCode.CONFIGURATION), f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="postbus-pipeline", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    texts: dict[str, tuple[Callable[[argparse.Namespace], None], str]] = {
        "run": (_run, "run the pipeline until it ends or gets SIGTERM"),
        "check": (_check, "check document, queries and columns, without a bus"),
        "explain": (_explain, "print what a batch does, with the columns of each output"),
        "status": (_status, "print where reader group, checkpoint and tables are"),
        "settle": (_settle, "settle what is committed, after a run that was killed"),
        "reset": (_reset, "forget checkpoint and positions of tables; their files stay"),
        "verify": (_verify, "compare the files of tables with their commits"),
    }
    for name, (command, text) in texts.items():
        sub = commands.add_parser(name, help=text, description=text.capitalize())
        sub.add_argument("file", type=Path, help="the document, of kind Pipeline")
        sub.set_defaults(command=command)
        if command in {_run, _settle, _status}:
            sub.add_argument(
                "--connection-string-file",
                metavar="FILE",
                help=CONNECTION_HELP,
            )
        if command is _run:
            sub.add_argument(
                "--again",
                action="store_true",
                help="try a batch once more that has failed as often as it may",
            )
            sub.add_argument(
                "--error-file",
                type=Path,
                metavar="FILE",
                help="write the error that ends the run there, too",
            )
    _add_dead_letters(commands)
    text = "be an executor of Spark, whose driver has made this pod of Kubernetes"
    commands.add_parser("executor", help=text, description=text.capitalize()).set_defaults(
        command=_executor
    )
    return parser


def _add_dead_letters(commands: Any) -> None:
    text = "group the dead letters of an entity by cause; changes nothing"
    sub = commands.add_parser("dead-letters", help=text, description=text.capitalize())
    sub.add_argument("entity", help="a queue, or topic/Subscriptions/name")
    sub.add_argument("--transfer", action="store_true", help="transfer dead letters instead")
    sub.add_argument("--html", type=Path, metavar="FILE", help="write a page with all causes")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write them for programs")
    sub.add_argument("--connection-string-file", metavar="FILE", help=CONNECTION_HELP)
    sub.set_defaults(command=_dead_letters)


# --- commands -----------------------------------------------------------------------------------


def _run(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.readers import readers_of
    from postbus_spark.jobs.runner import Runner
    from postbus_spark.jobs.streams import check_frames

    document = _document(given)
    if document.spec.source.is_bounded:
        _replay(document, given.connection_string_file)
        return
    readers = readers_of(document, given.connection_string_file)
    for reader in readers:
        reader.client.group()
    runner = Runner(document, readers, is_tried_again=given.again)
    spark = _session(document.metadata.name)
    _on_signals(runner.stop)
    try:
        check_frames(document.spec, spark)
        runner.run(spark)
    finally:
        spark.stop()


def _replay(document: PipelineDocument, connection_file: str | None) -> None:
    """Send what is not published yet, and wait for all that is. Waiting needs no Spark."""
    from postbus_spark.jobs.replay import Replay

    replay = Replay(document, connection_file)
    _on_signals(replay.stop)
    if unsent := replay.unsent():
        spark = _session(document.metadata.name)
        try:
            replay.send(spark, unsent)
        finally:
            spark.stop()
    replay.wait()


def _on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def _check(given: argparse.Namespace) -> None:
    document = _document(given)
    spark = _session(document.metadata.name)
    try:
        _checked(document, spark)
    finally:
        spark.stop()
    print(f"{given.file}: the pipeline {document.metadata.name} is valid")


def _explain(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.explaining import explained

    document = _document(given)
    spark = _session(document.metadata.name)
    try:
        for line in explained(document, _checked(document, spark)):
            print(line)
    finally:
        spark.stop()


def _checked(document: PipelineDocument, spark: SparkSession) -> dict[str, DataFrame]:
    """Return the outputs without rows. Raises `InvalidPipeline`."""
    from postbus_spark.jobs.frames import frames_of
    from postbus_spark.jobs.replay import no_messages, rows_of
    from postbus_spark.jobs.streams import check_frames

    if not document.spec.source.is_bounded:
        return check_frames(document.spec, spark)
    messages = no_messages(document.spec, spark)
    rows_of(document.spec, messages)
    return frames_of(document.spec, {document.spec.source.name: messages})


def _status(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.explaining import replay_status, status
    from postbus_spark.jobs.readers import readers_of
    from postbus_spark.jobs.replay import Replay

    document = _document(given)
    if document.spec.source.is_bounded:
        for line in replay_status(
            document, Replay(document, given.connection_string_file).published()
        ):
            print(line)
        return
    readers = readers_of(document, given.connection_string_file)
    for line in status(document, [reader.client.ranges() for reader in readers]):
        print(line)


def _settle(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.readers import readers_of
    from postbus_spark.jobs.settling import settle_committed

    document = _document(given)
    checkpoint = document.spec.checkpoint
    if checkpoint is None:
        _has_nothing_to("settle", document)
        return
    readers = readers_of(document, given.connection_string_file)
    settled = [
        settle_committed(reader.client, Path(checkpoint.path), None, at, len(readers))
        for at, reader in enumerate(readers)
    ]
    if settled == len(readers) * [None]:
        print("nothing to settle")


def _has_nothing_to(act: str, document: PipelineDocument) -> None:
    name = document.metadata.name
    print(f"nothing to {act}: {name} has neither a reader group nor a table that it writes")


def _reset(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.batches import tables_of
    from postbus_spark.jobs.state import forget_state

    document = _document(given)
    if document.spec.checkpoint is None:
        _has_nothing_to("reset", document)
        return
    for table in tables_of(document).values():
        table.open()
        table.forget()
        print(f"the table {table.folder} takes what comes next")
    checkpoint = Path(document.spec.checkpoint.path)
    if document.spec.is_stateful:
        forget_state(checkpoint)
        print(f"the checkpoint {checkpoint} is empty: the next run begins without state")
        return
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    print(f"the checkpoint {checkpoint} is gone: the next run begins where the reader group is")


def _verify(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.batches import tables_of
    from postbus_spark.lake.places import InvalidTable

    document = _document(given)
    if document.spec.source.is_bounded:
        _has_nothing_to("verify", document)
        return
    problems = []
    for table in tables_of(document).values():
        found = table.verified()
        print(f"{table.folder}: {found.commits} commits, {found.files} files, {found.rows} rows")
        problems += found.problems
    if problems:
        raise InvalidTable("\n".join(problems))


def _executor(_given: argparse.Namespace) -> None:
    from postbus_spark.jobs.executor import run_executor

    run_executor()


def _dead_letters(given: argparse.Namespace) -> None:
    from postbus_spark.jobs.dead_letters import causes_of, html_of, json_of, lines_of
    from postbus_spark.options import read_options
    from postbus_spark.tokens import load_credentials

    options = {
        "entity": given.entity,
        "subQueue": "transferDeadLetter" if given.transfer else "deadLetter",
    }
    if given.connection_string_file is not None:
        options["connectionStringFile"] = str(Path(given.connection_string_file).absolute())
    read_options({**options, "mode": "peek"})
    load_credentials(options.get("connectionStringFile"))
    spark = _session(f"dead letters of {given.entity}")
    try:
        causes = causes_of(spark, options)
    finally:
        spark.stop()
    for file, text in ((given.html, html_of), (given.json, json_of)):
        if file is not None:
            file.write_text(text(given.entity, causes), encoding="utf-8")
    for line in lines_of(causes):
        print(line)


def _document(given: argparse.Namespace) -> PipelineDocument:
    from postbus_spark.jobs.documents import read_pipeline

    document = read_pipeline(given.file)
    _make_importable(str(given.file.resolve().parent))
    return document


def _make_importable(folder: str) -> None:
    """Let the transformation's module be imported from beside the document, also by workers."""
    sys.path.append(folder)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{folder}" if known else folder


def _session(name: str) -> SparkSession:
    """Start Spark, or return the session that runs. Raises `JavaMissing`."""
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    from postbus_spark.jobs.failures import JavaMissing

    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise JavaMissing("Spark needs Java 17 or 21, and there is no java on PATH: install it")
    for logger in QUERY_LOGGERS:
        PySparkLogger.getLogger(logger).setLevel(logging.CRITICAL)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    for name, value in SESSION.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


if __name__ == "__main__":
    sys.exit(main())
