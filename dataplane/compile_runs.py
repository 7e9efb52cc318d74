#!/usr/bin/env python3
"""Compiles `postbus/fast/_runs.pyx`: into wheels, as a hook of hatchling, or into this checkout.

`POSTBUS_ACCELERATE` chooses as it does for the broker: `auto` makes a pure wheel where Cython, a C
compiler or Python's headers are missing, `require` fails there, `off` makes a pure one. An editable
installation is pure until `make accelerate`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).resolve().parent / "postbus" / "fast"
FLAGS = ("-O2", "-fPIC", "-fwrapv", "-fno-strict-aliasing", "-DNDEBUG")


def compiler() -> list[str]:
    """Return the command of the C compiler: `CC`, or the one that compiled this Python."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def missing() -> list[str]:
    """Return what cannot be found on this machine and is needed to compile."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    found = {
        "Cython": find_spec("Cython") is not None,
        f"a C compiler ({compiler()[0]})": shutil.which(compiler()[0]) is not None,
        f"Python's headers ({headers})": headers.is_file(),
        "64 bits": sys.maxsize > 2**32,
    }
    return [name for name, is_there in found.items() if not is_there]


def compile_runs(folder: Path) -> Path:
    """Compile into a folder and return the module; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "_runs.c"
        translate = [sys.executable, "-m", "cython", "-3", str(FOLDER / "_runs.pyx")]
        subprocess.run([*translate, "-o", str(source)], check=True)
        made = Path(work) / f"_runs{sysconfig.get_config_var('EXT_SUFFIX')}"
        digest = sha256((FOLDER / "_runs.pyx").read_bytes()).hexdigest()
        more = shlex.split(os.environ.get("CFLAGS", ""))
        flags = [*FLAGS, f'-DPOSTBUS_SOURCE="{digest}"', *more]
        headers = sysconfig.get_path("include")
        subprocess.run(
            [*compiler(), *flags, "-shared", f"-I{headers}", str(source), "-o", str(made)],
            check=True,
        )
        target = folder / made.name
        target.unlink(missing_ok=True)  # running processes keep the file that they have loaded
        return Path(shutil.copy(made, target))


class RunsHook(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel, which then is one of this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the wheel is to be pure or nothing can be compiled here."""
        choice = os.environ.get("POSTBUS_ACCELERATE", "auto")
        if version == "editable" or choice == "off":
            return
        lacking = ", ".join(missing())
        if lacking and choice == "require":
            raise SystemExit(f"POSTBUS_ACCELERATE is require, but this machine lacks {lacking}")
        if lacking:
            self.app.display_warning(f"a wheel of pure Python, since this machine lacks {lacking}")
            return
        self._made = tempfile.TemporaryDirectory()
        module = compile_runs(Path(self._made.name))
        build_data["force_include"][str(module)] = f"postbus/fast/{module.name}"
        build_data.update(pure_python=False, infer_tag=True)


def main() -> None:
    """Compile into the checkout."""
    if lacking := ", ".join(missing()):
        raise SystemExit(f"not compiled: this machine lacks {lacking}")
    print(compile_runs(FOLDER))


if __name__ == "__main__":
    main()
