"""YAML documents with the line of every field, for error messages with a location.

As strict as Kubernetes: a key occurs once, keys are text, dates stay text. Kinds are interpreted by
`postbus.manifests` and by the runner of pipelines.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, get_args

import yaml
from pydantic import ValidationError

from postbus.contract.entities import Model

MAX_FILE_BYTES: Final = 4 * 1024 * 1024  # several objects of up to 1.5 MB (API server)
MAX_NODES: Final = 200_000  # aliases must not make a small file large
MAX_DEPTH: Final = 50
TOO_DEEP: Final = "the document is too large or nested too deeply"

FieldPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class ManifestProblem:
    """An error in a manifest; `line` counts from 1, `where` is a field such as
    `spec.lockDuration`.
    """

    file: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        return place + (f"{self.where}: " if self.where else "") + self.message


class ManifestError(Exception):
    """The manifests are invalid or cannot be read."""

    def __init__(self, problems: Iterable[ManifestProblem]) -> None:
        self.problems = sorted(problems)
        super().__init__("\n".join(map(str, self.problems)))


class _Loader(yaml.SafeLoader):
    """Safe loader that leaves dates as text, as the API server's JSON does."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Malformed(Exception):
    """The text is not YAML, or not YAML that Kubernetes would accept."""

    def __init__(self, line: int, message: str) -> None:
        self.line = line
        self.message = message
        super().__init__(message)


class Document:
    """One document: its value, and the line of every field by path."""

    def __init__(self, file: str, node: yaml.Node) -> None:
        self.file = file
        self.lines: dict[FieldPath, int] = {}
        self._nodes = 0
        self._scalars = yaml.constructor.SafeConstructor()
        self.value = self._convert(node, ())

    def _convert(self, node: yaml.Node, path: FieldPath) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise Malformed(line, TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(item, (*path, at)) for at, item in enumerate(node.value)]
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise Malformed(line, f"unreadable value {node.value!r}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise Malformed(line, "this number cannot be used")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise Malformed(line, "this number is too large")
        if value is not None and not isinstance(value, bool | int | float | str):
            raise Malformed(line, f"values tagged {node.tag} cannot be used")
        return value

    def _convert_mapping(self, node: yaml.MappingNode, path: FieldPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                raise Malformed(line, "keys must be plain text")
            key = str(key_node.value)
            if key in result:
                raise Malformed(line, f"the key {key!r} occurs twice")
            self.lines[*path, key] = line
            result[key] = self._convert(value_node, (*path, key))
        return result

    def problem(self, path: FieldPath, message: str) -> ManifestProblem:
        """Return a problem with a field; its line is its parent's if the field is absent."""
        known = path
        while known and known not in self.lines:
            known = known[:-1]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        return ManifestProblem(
            self.file, self.lines.get(known, 0), where.removeprefix("."), message
        )


def read_documents(path: Path, shown: str) -> Iterator[Document]:
    """Yield the documents of a file named `shown` in messages; raises `ManifestError`.

    `-` is standard input, which can be read only once.
    """
    is_stdin = str(path) == "-"
    shown = "standard input" if is_stdin else shown
    try:
        with sys.stdin.buffer if is_stdin else path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ManifestError([ManifestProblem(shown, 0, "", "the file is larger than 4 MiB")])
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ManifestError(
            [ManifestProblem(shown, 0, "", "the file is not UTF-8 text")]
        ) from error
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ManifestError([ManifestProblem(shown, 0, "", reason.lower())]) from error
    yield from parse_documents(text, shown)


def parse_documents(text: str, shown: str) -> Iterator[Document]:
    """Yield the documents of a text named `shown` in messages; raises `ManifestError`."""
    try:
        for node in yaml.compose_all(text, Loader=_Loader):
            if not isinstance(node, yaml.ScalarNode) or node.value:
                yield Document(shown, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        message = f"no valid YAML: {error.problem or error}"
        raise ManifestError([ManifestProblem(shown, line, "", message)]) from error
    except yaml.YAMLError as error:
        raise ManifestError([ManifestProblem(shown, 0, "", f"no valid YAML: {error}")]) from error
    except Malformed as error:
        raise ManifestError([ManifestProblem(shown, error.line, "", error.message)]) from error
    except RecursionError as error:  # PyYAML recurses before `MAX_DEPTH` is checked
        raise ManifestError([ManifestProblem(shown, 0, "", TOO_DEEP)]) from error


def files_of(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files as given, and the `*.yaml` and `*.yml` files of folders in order."""
    for path in paths:
        if path.is_dir():
            found = sorted(item for item in path.iterdir() if item.suffix in {".yaml", ".yml"})
            if not found:
                raise ManifestError(
                    [ManifestProblem(str(path), 0, "", "no .yaml files in this folder")]
                )
            yield from found
        else:
            yield path


# --- checking -----------------------------------------------------------------------------------

M = TypeVar("M", bound=Model)


def read_as(document: Document, model: type[M]) -> tuple[M | None, list[ManifestProblem]]:
    """Return a document as its model, or None and everything that is wrong with it."""
    try:
        return model.model_validate_json(json.dumps(document.value), strict=True), []
    except ValidationError as failure:
        return None, [
            document.problem(tuple(error["loc"]), _explain(error, model))
            for error in failure.errors(include_url=False)
        ]


def _explain(error: Any, model: type[Model]) -> str:
    """Return a sentence for an error of pydantic."""
    kind = error["type"]
    if kind == "extra_forbidden":
        close = get_close_matches(str(error["loc"][-1]), _field_names(model), 1)
        return "unknown field" + (f"; did you mean {close[0]}?" if close else "")
    if kind == "missing":
        return "this field is required"
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:] if kind != "value_error" else message


def _field_names(model: type[Model]) -> list[str]:
    names = []
    for name, info in model.model_fields.items():
        names.append(info.alias or name)
        for below in _models_of(info.annotation):
            names += _field_names(below)
    return names


def _models_of(annotation: object) -> Iterator[type[Model]]:
    """Yield the models in a type, such as in a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        yield annotation
    for each in get_args(annotation):
        yield from _models_of(each)
