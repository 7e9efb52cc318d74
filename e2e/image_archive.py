"""Write an image archive of one layer, as `docker save` does, without a builder or a daemon.

    image_archive.py ARCHIVE NAME:TAG FOLDER PROGRAM

FOLDER is the root of the image, PROGRAM its entry point. The same files give the same archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ENVIRONMENT = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]


def write_archive(archive: Path, name: str, folder: Path, program: str) -> None:
    """Write the archive; it appears under its name once it is complete."""
    layer = pack(folder)
    config = encode({
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {"Env": ENVIRONMENT, "Entrypoint": [program]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hash_of(layer)}"]},
    })  # fmt: skip
    parts = {f"{hash_of(config)}.json": config, f"{hash_of(layer)}/layer.tar": layer}
    config_name, layer_name = parts
    manifest = {"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}
    parts["manifest.json"] = encode([manifest])

    unfinished = archive.with_suffix(".part")
    with tarfile.open(unfinished, "w") as file:
        for part, content in parts.items():
            entry = tarfile.TarInfo(part)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    os.replace(unfinished, archive)


def pack(folder: Path) -> bytes:
    """Return the files of a folder as a tar, owned by root and without times."""

    def strip(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = 0
        return entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, arcname=path.name, filter=strip)
    return packed.getvalue()


def encode(value: object) -> bytes:
    return json.dumps(value).encode()


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    write_archive(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
