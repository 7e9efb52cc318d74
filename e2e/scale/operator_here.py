"""The operator outside of a cluster: names of pods are those of the stand-in on this machine."""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

from postbus_operator.__main__ import main

SUFFIX: Final = ".svc.cluster.local"
_resolve = socket.getaddrinfo


def _resolve_pods(host: Any, *arguments: Any, **options: Any) -> Any:
    is_pod = isinstance(host, str) and host.endswith(SUFFIX)
    return _resolve("127.0.0.1" if is_pod else host, *arguments, **options)


if __name__ == "__main__":
    socket.getaddrinfo = _resolve_pods
    sys.exit(main())
