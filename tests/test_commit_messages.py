"""The check of commit messages, on repositories made for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECK = Path(".ci", "commit_messages.py")
BASELINE = Path(".ci", "commit-baseline")
GOOD = "store: write rows in blocks\n\nA commit wrote them one by one.\n"


class Repository:
    """A repository whose first commit has the check and its baseline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / CHECK, folder / CHECK)
        self.git("init", "--quiet")
        self.commit("whatever came before;", {".gitignore": "*.pyc\n"})
        self.commit("ci: check commit messages", {str(BASELINE): "from here\n"})

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgSign=false"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stage(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")

    def commit(self, message: str, files: dict[str, str] | None = None) -> None:
        self.stage(files or {})
        self.git("commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)

    def check(self, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [self.folder / CHECK, *arguments],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def lines(count: int) -> str:
    return "".join(f"line {number}\n" for number in range(count))


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "complaint"),
    [
        ("store: write rows in blocks", None),
        ("edge, cli: name the listener in errors", None),
        ('Revert "store: write rows in blocks"', None),
        ("write rows in blocks", "begin the title with an area"),
        ("stores: write rows in blocks", "begin the title with an area"),
        ("edge, stores: write rows in blocks", "begin the title with an area"),
        ("store:write rows in blocks", "begin the title with an area"),
        ("store: write rows in blocks; read them back", "no ';' in the title"),
        (f"store: {'x' * 64}", None),
        (f"store: {'x' * 65}", "shorten the title to 71 characters; it has 72"),
    ],
)
def test_title_has_an_area_one_topic_and_fewer_than_72_characters(
    repository: Repository, title: str, complaint: str | None
) -> None:
    repository.commit(title)
    code, output = repository.check()
    if complaint is None:
        assert (code, output) == (0, "commit messages: 1 checked\n")
    else:
        assert code == 1
        assert title in output
        assert complaint in output


@pytest.mark.parametrize(
    ("message", "count", "is_refused"),
    [
        ("store: write rows", 30, False),
        ("store: write rows", 31, True),
        ("store: write rows\n\nOne by one took 3 ms.", 31, False),
        ("store: write rows\n\nMeasured: 3 ms less.", 31, False),
        ("store: write rows\n\nSigned-off-by: N <n@example.org>", 31, True),
    ],
)
def test_body_is_required_above_thirty_changed_lines(
    repository: Repository, message: str, count: int, is_refused: bool
) -> None:
    repository.commit(message, {"a.py": lines(count)})
    code, output = repository.check()
    assert code == is_refused
    assert ("31 lines changed" in output) is is_refused


def test_renames_and_generated_files_need_no_body(repository: Repository) -> None:
    repository.commit(GOOD, {"old.py": lines(100)})
    (repository.folder / "old.py").rename(repository.folder / "new.py")
    repository.commit("store: rename a module")
    repository.commit("edge: describe a field", {"docs/openapi.json": lines(100)})
    assert repository.check() == (0, "commit messages: 3 checked\n")


def test_packages_and_planned_folders_are_areas(repository: Repository) -> None:
    below = {path.parent.name for path in (ROOT / "dataplane" / "postbus").glob("*/__init__.py")}
    assert len(below) >= 7
    for name in below | {"docs", "tests", "bench", "examples"}:
        repository.commit(f"{name}: change")
    assert repository.check()[0] == 0


# --- history ------------------------------------------------------------------------------------


def test_commits_up_to_the_baseline_and_merges_are_not_checked(repository: Repository) -> None:
    assert repository.check() == (0, "commit messages: 0 checked\n")
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit(GOOD, {"a.py": lines(40)})
    repository.git("checkout", "--quiet", "-")
    repository.commit("docs: say more", {"b.md": "more\n"})
    repository.git("merge", "--quiet", "--message", "Merge branch side", "side")
    assert repository.check() == (0, "commit messages: 2 checked\n")


def test_baseline_moves_with_a_change_of_its_file(repository: Repository) -> None:
    repository.commit("bad")
    assert repository.check()[0] == 1
    repository.commit("ci: check commits from here", {str(BASELINE): "from here on\n"})
    assert repository.check() == (0, "commit messages: 0 checked\n")


@pytest.mark.parametrize(("depth", "checked"), [(1, 0), (3, 2)])
def test_shallow_clone_checks_its_own_commits(
    repository: Repository, tmp_path: Path, depth: int, checked: int
) -> None:
    repository.commit("bad")
    for _ in range(3):
        repository.commit(GOOD, {"a.py": lines(100)})
    source = repository.folder.as_uri()
    repository.git("clone", "--quiet", f"--depth={depth}", source, str(tmp_path / "clone"))
    repository.folder = tmp_path / "clone"
    assert repository.check() == (0, f"commit messages: {checked} checked\n")


def test_squashed_history_passes(repository: Repository) -> None:
    repository.commit("bad", {"a.py": lines(100)})
    repository.git("checkout", "--quiet", "--orphan", "squashed")
    repository.commit("Everything")
    assert repository.check() == (0, "commit messages: 0 checked\n")


def test_folder_without_a_repository_passes(repository: Repository) -> None:
    shutil.rmtree(repository.folder / ".git")
    code, output = repository.check()
    assert (code, output.partition(": fatal")[0]) == (0, "commit messages: nothing to check")


def test_history_without_the_baseline_passes(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "--orphan", "other")
    repository.git("rm", "--quiet", "--cached", str(BASELINE))
    repository.git("commit", "--quiet", "--message", "bad")
    assert repository.check() == (
        0, "commit messages: nothing to check: no commit has commit-baseline\n",
    )  # fmt: skip


# --- hook ---------------------------------------------------------------------------------------


def commit_with_hook(repository: Repository, message: str) -> subprocess.CompletedProcess[str]:
    repository.git("config", "user.name", "n")
    repository.git("config", "user.email", "n@example.org")
    return subprocess.run(
        ["git", "commit", "--quiet", "--file=-"], cwd=repository.folder, input=message,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def make_hooks(repository: Repository) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--silent", "--file", ROOT / "Makefile", "hooks"],
        cwd=repository.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_hook_refuses_a_message_and_lets_a_good_one_pass(repository: Repository) -> None:
    for _ in range(2):
        assert make_hooks(repository).returncode == 0
    repository.stage({"a.py": lines(40)})
    done = commit_with_hook(repository, "store: write rows in blocks\n")
    assert done.returncode == 1
    assert "40 lines changed: say in a body why" in done.stderr
    done = commit_with_hook(repository, GOOD)
    assert (done.returncode, done.stderr) == (0, "")
    repository.stage({"a.py": lines(41)})
    assert commit_with_hook(repository, "fixup! store: write rows in blocks\n").returncode == 0


def test_hook_reads_no_comments_and_no_diff(repository: Repository) -> None:
    path = repository.folder.parent / "message"
    path.write_text(
        "# Write a message;\nstore: write rows\n\n# On branch main\n"
        "# ------------------------ >8 ------------------------\n+" + "x;" * 100
    )
    repository.stage({"a.py": lines(31)})
    code, output = repository.check(str(path))
    assert (code, output.count("\n")) == (1, 1)
    assert "31 lines changed" in output


def test_foreign_hook_is_not_replaced(repository: Repository) -> None:
    hook = repository.folder / ".git" / "hooks" / "commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\n")
    done = make_hooks(repository)
    assert (done.returncode, "commit-msg exists" in done.stderr) == (2, True)
    assert hook.read_text() == "#!/bin/sh\n"
