"""Report functions, classes, methods and constants that no product code refers to.

    .venv/bin/mypy --export-ref-info --no-sqlite-cache
    .venv/bin/python -m tests.unused_definitions

`make check` runs both. Names are followed through imports. Members need types: mypy writes down in
its cache which class each attribute belongs to. Where it knows no type, the bare name counts.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

ROOT: Final = Path(__file__).resolve().parent.parent

PACKAGES: Final = (
    ROOT / "dataplane" / "postbus",
    ROOT / "operator" / "postbus_operator",
    ROOT / "pipeline" / "postbus_spark",
)

USERS: Final = {"postbus": PACKAGES[1:]}
"""Packages for which another one has definitions: the contract of pipelines."""

EXCEPTIONS: Final[dict[str, str]] = {
    "postbus.assembly.bus.Bus.listeners": "tests run a bus in their own process",
    "postbus.assembly.bus.Bus.sample": "tests run a bus in their own process",
    "postbus.edge.atom.xml_text._Builder.end_ns": "the XML parser calls it",
    "postbus.edge.atom.xml_text._Builder.start_ns": "the XML parser calls it",
    "postbus.process.embedded.EmbeddedPostgres.restart": "fault tests restart the server of a bus",
    "postbus.process.metrics.BusCollector.describe": "the registry of prometheus_client calls it",
    "postbus_operator.kube.watch_session._Heard.iter_chunked": "kopf reads watches with it",
}
"""Definitions that the product does not refer to -> why they stay."""

PUBLIC: Final = {"postbus.testing"}
"""Modules for users: public names there count as used."""

CALLED_BY_NAME: Final = {"lark.Transformer"}
"""Bases outside the package that call methods by names which appear in no code."""

INERT: Final = frozenset({
    "abstractmethod", "asynccontextmanager", "cache", "cached_property", "classmethod",
    "contextmanager", "dataclass", "deleter", "final", "lru_cache", "overload", "override",
    "property", "setter", "staticmethod", "wraps",
})  # fmt: skip
"""Decorators that register nothing. A definition with any other one counts as used."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Reference(NamedTuple):
    """`target` is a dotted name, `*.name` for a member of something without a known type."""

    target: str
    module: str
    line: int


class Definition(NamedTuple):
    """`owner` is the class of a method."""

    name: str
    module: str
    first_line: int
    last_line: int
    owner: str | None = None

    def holds(self, reference: Reference) -> bool:
        return (
            reference.module == self.module and self.first_line <= reference.line <= self.last_line
        )


class Module:
    """A parsed file. `names` maps local names to dotted ones, of imports and definitions."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.tree = tree
        self.names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.names[alias.asname or top] = alias.name if alias.asname else top
        for defined, _ in self.top_level():
            self.names[defined] = f"{name}.{defined}"

    def top_level(self) -> Iterator[tuple[str, ast.stmt]]:
        """Yield the names that the module defines, with the statement."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef | Function):
                yield node.name, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, node

    def dotted(self, node: ast.AST) -> str | None:
        """Return the dotted name of an expression, without arguments; None if it has none."""
        match node:
            case ast.Name(name):
                return self.names.get(name)
            case ast.Attribute(value, attribute):
                owner = self.dotted(value)
                return None if owner is None else f"{owner}.{attribute}"
            case ast.Subscript(value) | ast.Call(value):
                return self.dotted(value)
        return None

    def references(self) -> Iterator[Reference]:
        """Yield names that are read, also in annotations, and attributes read by `getattr`."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()):
                    target = self.dotted(node)
                    if target is not None:
                        yield Reference(target, self.name, node.lineno)
                case ast.Call(ast.Name("getattr" | "hasattr"), [_, ast.Constant(str(name)), *_]):
                    yield Reference(f"*.{name}", self.name, node.lineno)
                case ast.Constant(str(text)):
                    yield from self._quoted(text, node.lineno)

    def _quoted(self, text: str, line: int) -> Iterator[Reference]:
        """Yield the names of a quoted annotation."""
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError):
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in self.names:
                yield Reference(self.names[node.id], self.name, line)


class Program:
    """The modules of a package, their definitions and references."""

    def __init__(self, package: Path, cache: Path, users: Sequence[Path] = ()) -> None:
        """Read a package and mypy's data on it in `cache`. `users`: packages that import it."""
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, tuple[Module, ast.ClassDef]] = {}
        references: list[Reference] = []
        for folder in (package, *users):
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder.parent).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                module = Module(name, ast.parse(path.read_text("utf-8")))
                if folder == package:
                    self.modules[name] = module
                    for node in ast.walk(module.tree):
                        if isinstance(node, ast.ClassDef):
                            self.classes[f"{name}.{node.name}"] = module, node
                references += module.references()
                written = cache.joinpath(*parts[:-1], f"{parts[-1]}.refs.json").read_text("utf-8")
                references += [
                    Reference(each["target"], name, each["line"]) for each in json.loads(written)
                ]
        self.references: defaultdict[str, list[Reference]] = defaultdict(list)
        for reference in references:
            self.references[self.origin(reference.target)].append(reference)
        self.protocols = [each for each in self.classes if self._is_protocol(each)]
        self.relatives = {each: {each} for each in self.classes}
        for name in self.classes:
            for ancestor in self.ancestors(name) & self.classes.keys():
                self.relatives[name].add(ancestor)
                self.relatives[ancestor].add(name)
        self.definitions = list(self._definitions())

    def origin(self, name: str) -> str:
        """Return where a name is defined, for one that may have been imported from elsewhere."""
        while True:
            module, _, last = name.rpartition(".")
            further = self.modules[module].names.get(last) if module in self.modules else None
            if further is None or further == name:
                return name
            name = further

    def ancestors(self, name: str) -> set[str]:
        """Return the bases of a class, and theirs."""
        if name not in self.classes:
            return set()
        module, node = self.classes[name]
        bases = {self.origin(base) for each in node.bases if (base := module.dotted(each))}
        return bases.union(*map(self.ancestors, bases))

    def _is_protocol(self, name: str) -> bool:
        module, node = self.classes[name]
        return any(module.dotted(each) == "typing.Protocol" for each in node.bases)

    def _definitions(self) -> Iterator[Definition]:
        for module in self.modules.values():
            for name, node in module.top_level():
                dotted = f"{module.name}.{name}"
                is_public = module.name in PUBLIC and not name.startswith("_")
                if not (is_public or name.startswith("__") or is_registered(node)):
                    yield Definition(dotted, module.name, node.lineno, node.end_lineno or 0)
                if isinstance(node, ast.ClassDef):
                    yield from self._methods(module, node, dotted)

    def _methods(self, module: Module, owner: ast.ClassDef, dotted: str) -> Iterator[Definition]:
        for node in owner.body:
            if not isinstance(node, Function):
                continue
            name = node.name
            is_public = module.name in PUBLIC and not name.startswith("_")
            if not (
                is_public
                or name.startswith("__")
                or is_registered(node)
                or self._is_called_by_base(dotted, name)
            ):
                lines = node.lineno, node.end_lineno or 0
                yield Definition(f"{dotted}.{name}", module.name, *lines, owner=dotted)

    def _is_called_by_base(self, owner: str, method: str) -> bool:
        """Return whether a base outside the package has the method, or calls any."""
        for base in self.ancestors(owner) - self.classes.keys():
            module, _, name = base.rpartition(".")
            if base in CALLED_BY_NAME or (
                module and hasattr(getattr(importlib.import_module(module), name), method)
            ):
                return True
        return False

    def unused(self, exceptions: set[str]) -> list[Definition]:
        """Return definitions that nothing refers to but themselves and other unused ones."""
        unused: list[Definition] = []
        left = [each for each in self.definitions if each.name not in exceptions]
        while found := [each for each in left if not self._is_used(each, unused)]:
            unused += found
            left = [each for each in left if each not in found]
        return sorted(unused, key=lambda each: (each.module, each.first_line))

    def _is_used(self, definition: Definition, unused: list[Definition]) -> bool:
        names = [definition.name]
        if definition.owner is not None:
            member = definition.name.rpartition(".")[2]
            owners = [*self.relatives[definition.owner], *self.protocols, "*"]
            names = [f"{owner}.{member}" for owner in owners]
        return any(
            not any(each.holds(reference) for each in (definition, *unused))
            for name in names
            for reference in self.references.get(name, ())
        )


def is_registered(node: ast.stmt) -> bool:
    """Return whether a decorator hands a definition to a framework: a command, a validator."""
    for decorator in getattr(node, "decorator_list", ()):
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).rpartition(".")[2] not in INERT:
            return True
    return False


def complaints(program: Program, exceptions: dict[str, str]) -> list[str]:
    """Return a line for each unused definition and each exception that is not needed."""
    lines = [
        f"{each.module}:{each.first_line}: {each.name} is not used by the product"
        for each in program.unused(set(exceptions))
    ]
    needed = {each.name for each in program.unused(set())}
    return lines + [
        f"{name} is used or gone: remove it from EXCEPTIONS"
        for name in exceptions
        if name not in needed
    ]


def main() -> str | int:
    """Return the argument of `sys.exit`: the complaints, or 0."""
    cache = ROOT / ".mypy_cache" / "3.11"
    lines = []
    try:
        for folder in PACKAGES:
            exceptions = {
                name: reason
                for name, reason in EXCEPTIONS.items()
                if name.startswith(f"{folder.name}.")
            }
            users = USERS.get(folder.name, ())
            lines += complaints(Program(folder, cache, users), exceptions)
    except FileNotFoundError as error:
        return f"{error.filename} is missing: remove .mypy_cache, then run make check"
    return "\n".join(lines) or 0


if __name__ == "__main__":
    sys.exit(main())
