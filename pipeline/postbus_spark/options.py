"""Options of the format `postbus`, with the vocabulary of Spark's Kafka source.

Spark compares the names of options without case, and hands them over in lower case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from postbus_spark.errors import InvalidOption
from postbus_spark.offsets import Offset

SubQueue: TypeAlias = Literal["main", "deadLetter", "transferDeadLetter"]
PropertiesFormat: TypeAlias = Literal["map", "json"]

DEFAULT_BYTES_PER_TRIGGER: Final = 256 << 20
"""Our choice: some seconds of work, and far below the memory of a small driver and its workers."""

MAX_PARTITIONS: Final = 10_000

MAX_RATE: Final = 1_000_000
WRITER_NAME: Final = r"[a-z0-9][a-z0-9._-]{0,127}"
"""As in `postbus.contract.bulk`, which executors do not import."""

SINK_NAMES: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of Spark's own that a sink gets, too."""

GROUPLESS_MODES: Final = ("peek", "history")
MAX_TIME_MS: Final = 2**53
KEY_NAMES: Final = frozenset({
    "connectionstring", "sharedaccesskey", "sharedaccesskeyname", "sharedaccesssignature", "key",
    "token", "password", "kafka.sasl.jaas.config", "eventhubs.connectionstring",
})  # fmt: skip
"""Options of other connectors, which would show a key in plans and in Spark's pages."""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options. `mode` None: that of the group. `starting` None: where the group is. Limits
    0: none. Without a group, as `mode` says, `reader_group` is "". Times of a history are in
    milliseconds since the epoch; None: no bound.
    """

    entity: str
    reader_group: str = ""
    endpoint: str | None = None
    sub_queue: SubQueue = "main"
    mode: str | None = None
    starting: Offset | None = None
    max_messages: int = 0
    max_bytes: int = DEFAULT_BYTES_PER_TRIGGER
    min_partitions: int = 1
    is_data_loss_fatal: bool = True
    connection_string_file: str | None = None
    tls_ca_file: str | None = None
    is_raw_included: bool = False
    properties_format: PropertiesFormat = "map"
    from_ms: int | None = None
    to_ms: int | None = None
    is_plan_only: bool = False

    @property
    def is_groupless(self) -> bool:
        """Return whether the mode reads without a reader group."""
        return self.mode in GROUPLESS_MODES

    @property
    def offset_entity(self) -> str:
        """Return the entity as offsets name it: with the sub-queue in Service Bus's way."""
        return self.entity + SUB_QUEUE_PATHS[self.sub_queue]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Checked options of writing. `rate`: messages per second, None for any number."""

    entity: str
    writer: str
    rate: int | None = None
    endpoint: str | None = None
    connection_string_file: str | None = None
    tls_ca_file: str | None = None


SUB_QUEUE_PATHS: Final[dict[SubQueue, str]] = {
    "main": "",
    "deadLetter": "/$deadletterqueue",
    "transferDeadLetter": "/$transfer/$deadletterqueue",
}


def read_options(given: Mapping[str, str]) -> Options:
    """Check options as Spark hands them over. Raises `InvalidOption`."""
    values = _values(given, _OPTIONS, _WRITE_OPTIONS, "writing")
    required = {"entity": "entity"}
    if values.get("mode") not in GROUPLESS_MODES:
        required["reader_group"] = "readerGroup"
    _check_there(values, required)
    options = Options(**values)  # type: ignore[arg-type]  # each reader returns its field's type
    _check_mode(options)
    return options


def _check_mode(options: Options) -> None:
    """Raise `InvalidOption` for an option that belongs to another mode."""
    mode = options.mode
    if options.is_groupless and options.reader_group:
        raise InvalidOption(
            f"option readerGroup: the mode {mode} reads what is there without a group: leave out"
            " readerGroup, or leave out mode to read what the group has not read"
        )
    if options.is_groupless and options.starting is not None:
        raise InvalidOption(
            f"option startingOffsets: the mode {mode} has no offsets: leave it out; a history takes"
            " startingTimestamp and endingTimestamp"
        )
    if options.is_groupless and options.is_plan_only:
        raise InvalidOption(f"option endingOffsets: the mode {mode} has no plan: leave it out")
    from_ms, to_ms = options.from_ms, options.to_ms
    if mode != "history" and (from_ms, to_ms) != (None, None):
        raise InvalidOption(
            "options startingTimestamp and endingTimestamp belong to the mode history: leave them"
            " out, or filter by the column enqueued_time"
        )
    if from_ms is not None and to_ms is not None and from_ms > to_ms:
        raise InvalidOption(f"option endingTimestamp: {to_ms} is before startingTimestamp")


def check_grouped(options: Options) -> None:
    """Raise `InvalidOption` for options without a reader group, where one is needed."""
    if options.is_groupless:
        raise InvalidOption(
            f"option mode: {options.mode} reads what is there now, and only as a batch: use"
            " spark.read; streams and rejections need a readerGroup instead"
        )


def write_options(given: Mapping[str, str]) -> WriteOptions:
    """Check options of writing as Spark hands them over. Raises `InvalidOption`."""
    own = {name: text for name, text in given.items() if name.lower() not in SINK_NAMES}
    values = _values(own, _WRITE_OPTIONS, _OPTIONS, "reading")
    _check_there(values, {"entity": "entity", "writer": "writer"})
    return WriteOptions(**values)  # type: ignore[arg-type]  # see above


def _values(
    given: Mapping[str, str], own: _Options, other: _Options, other_use: str
) -> dict[str, object]:
    """Return the values of options by field. `other`: options of another use, for texts."""
    own_names = {name.lower(): name for name in own}
    values: dict[str, object] = {}
    for name, text in given.items():
        folded = name.lower()
        if folded in KEY_NAMES:
            raise InvalidOption(
                f"the option {name} would show a key in query plans: put the connection string into"
                " a file and name it with connectionStringFile, or into the environment variable"
                " POSTBUS_CONNECTION_STRING"
            )
        if folded not in own_names:
            raise InvalidOption(_unknown(name, own_names, other, other_use))
        field, read = own[own_names[folded]]
        try:
            values[field] = read(str(text).strip())
        except ValueError as error:
            raise InvalidOption(f"option {own_names[folded]}: {error}") from None
    return values


def _unknown(name: str, own_names: Mapping[str, str], other: _Options, other_use: str) -> str:
    folded = name.lower()
    for each in other:
        if each.lower() == folded:
            return f"the option {each} is for {other_use}: leave it out here"
    found = get_close_matches(folded, own_names, n=1, cutoff=0.6)
    hint = (
        f", did you mean {own_names[found[0]]}?"
        if found
        else f": there are {', '.join(sorted(own_names.values(), key=str.lower))}"
    )
    return f"unknown option {name}{hint}"


def _check_there(values: Mapping[str, object], names: Mapping[str, str]) -> None:
    for field, name in names.items():
        if not values.get(field):
            raise InvalidOption(f"the option {name} is missing{_WHY[field]}")


_WHY: Final = {
    "entity": ": a queue, topic/Subscriptions/name to read, or a topic to write",
    "reader_group": ": a group keeps the messages that are to be read; create one with"
    " `postbus groups create`, or read what is there with the mode peek or history",
    "writer": ": the name under which batches are published, each once",
}


# --- values -------------------------------------------------------------------------------------


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        parts, has_port = urlsplit(""), False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not has_port:
        raise ValueError("an address such as https://bus.example:5671")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address without user and password")
    if parts.query or parts.fragment or parts.path.strip("/"):
        raise ValueError("an address without a path")
    return f"{parts.scheme}://{parts.netloc}"


def _entity(text: str) -> str:
    name = text.strip("/")
    if not name or "$" in name or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ValueError(
            "the name of a queue, or topic/Subscriptions/name; the option subQueue selects dead"
            " letters"
        )
    return name


def _target(text: str) -> str:
    name = _entity(text)
    if "/subscriptions/" in name.lower():
        raise ValueError(f"a queue or topic: messages are not sent to a subscription as {name} is")
    return name


def _mode(text: str) -> str:
    mode = text.lower()
    if mode not in {"tap", "drain", *GROUPLESS_MODES}:
        raise ValueError(f"there is no mode {text}, only tap, drain, peek and history")
    return mode


def _starting(text: str) -> Offset | None:
    if text.lower() == "group":
        return None
    if text.lower() in {"earliest", "latest"}:
        raise ValueError(
            f"{text} is decided when the group is created, and by `postbus groups reset`: use group"
        )
    try:
        return Offset.of(json.loads(text))
    except ValueError:
        raise ValueError("group, or an offset as JSON") from None


def _ending(text: str) -> bool:
    if text.lower() != "group":
        raise ValueError("group, for the end of what is planned and not settled")
    return True


def _count(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text[:20]) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(text)

    return read


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError("true or false")
    return text.lower() == "true"


def _file(text: str) -> str:
    """Return a path; whether the file can be read is found out where it is read."""
    if not text or "\x00" in text or not Path(text).is_absolute():
        raise ValueError("an absolute path of a file")
    return text


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    by_name = {choice.lower(): choice for choice in choices}

    def read(text: str) -> str:
        if text.lower() not in by_name:
            raise ValueError(f"one of {', '.join(choices)}")
        return by_name[text.lower()]

    return read


def _group(text: str) -> str:
    if not text:
        raise ValueError("the name of a reader group")
    return text


def _writer(text: str) -> str:
    if not re.fullmatch(WRITER_NAME, text):
        raise ValueError(
            "a name of small letters, digits and . _ - that begins with a letter or digit, with at"
            " most 128 characters"
        )
    return text


_Options: TypeAlias = Mapping[str, tuple[str, Callable[[str], object]]]

_OPTIONS: Final[_Options] = {
    "endpoint": ("endpoint", _endpoint),
    "entity": ("entity", _entity),
    "subQueue": ("sub_queue", _choice(get_args(SubQueue))),
    "mode": ("mode", _mode),
    "readerGroup": ("reader_group", _group),
    "startingOffsets": ("starting", _starting),
    "endingOffsets": ("is_plan_only", _ending),
    "maxMessagesPerTrigger": ("max_messages", _count(0, 2**53)),
    "maxBytesPerTrigger": ("max_bytes", _count(0, 2**53)),
    "minPartitions": ("min_partitions", _count(1, MAX_PARTITIONS)),
    "failOnDataLoss": ("is_data_loss_fatal", _flag),
    "connectionStringFile": ("connection_string_file", _file),
    "tlsCaFile": ("tls_ca_file", _file),
    "includeRaw": ("is_raw_included", _flag),
    "propertiesFormat": ("properties_format", _choice(get_args(PropertiesFormat))),
    "startingTimestamp": ("from_ms", _count(0, MAX_TIME_MS)),
    "endingTimestamp": ("to_ms", _count(0, MAX_TIME_MS)),
}
_WRITE_OPTIONS: Final[_Options] = {
    "endpoint": ("endpoint", _endpoint),
    "entity": ("entity", _target),
    "writer": ("writer", _writer),
    "rate": ("rate", _count(1, MAX_RATE)),
    "connectionStringFile": ("connection_string_file", _file),
    "tlsCaFile": ("tls_ca_file", _file),
}
