"""Write the settings of pip on this machine for a build of images: `pip_settings.py FOLDER`.

FOLDER gets `pip.conf`, with what reaches an index, and `ca.crt`, the certificates that pip trusts
here, empty if it uses its own. In the build both are secrets below /run/secrets, so that neither
addresses nor passwords stay in an image.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PASSED = (
    "default-timeout", "extra-index-url", "index-url", "proxy", "retries", "timeout",
    "trusted-host",
)  # fmt: skip
CERTIFICATES = "/run/secrets/ca.crt"


def read_settings(listed: str) -> dict[str, str]:
    """Return the settings that `pip config list` prints, as `global.proxy='http://…'`.

    Those of the environment, `:env:.proxy`, win as in pip.
    """
    settings = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def write_settings(settings: dict[str, str], folder: Path) -> None:
    """Write `pip.conf` and `ca.crt`."""
    # A value of several lines goes on where the next line is indented.
    lines = [
        f"{name} = {settings[name]}".replace("\n", "\n    ") for name in PASSED if name in settings
    ]
    certificates = Path(settings["cert"]).read_bytes() if "cert" in settings else b""
    if certificates:
        lines.append(f"cert = {CERTIFICATES}")
    (folder / "ca.crt").write_bytes(certificates)
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")


def main() -> None:
    """Write the settings of this machine's pip into the folder that is the only argument."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    write_settings(read_settings(listed.stdout), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
