"""Loads what every run needs; fixtures live in tests/conftest.py."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

pytest_plugins = ["tests.behaviour_report"]

MEMORY_DISK = Path("/dev/shm")
ROOMY_BYTES = 8 << 30  # a gigabyte for each worker, and for servers of single tests


def use_memory_disk() -> None:
    """Keep temporary files in memory when there is much of it and TMPDIR names no other place.

    Databases sync their files: on a disk, making or dropping one takes up to seconds. Processes
    that are killed leave the same files as on a disk.
    """
    if "TMPDIR" in os.environ or not MEMORY_DISK.is_dir():
        return
    is_executable = not os.statvfs(MEMORY_DISK).f_flag & os.ST_NOEXEC
    if is_executable and shutil.disk_usage(MEMORY_DISK).free > ROOMY_BYTES:
        os.environ["TMPDIR"] = str(MEMORY_DISK)
        tempfile.tempdir = None


use_memory_disk()
