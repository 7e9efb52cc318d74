"""List the buses and entities that need the operator; exit with 1 if there are any.

python remaining.py [CLUSTER NAMESPACE]...
"""

from __future__ import annotations

import sys

from cluster_api import KINDS, ApiError, ClusterApi

PLURALS = ("busnamespaces", "queues", "topics", "subscriptions", "pipelines")


def remaining(api: ClusterApi, namespaces: list[str]) -> list[str]:
    """Return the resources of these cluster namespaces; without any, those of all."""
    found = []
    for plural in PLURALS:
        for folder in [f"/namespaces/{each}" for each in namespaces] or [""]:
            try:
                items = api.request("GET", f"{KINDS}{folder}/{plural}")["items"]
            except ApiError as error:
                if error.status != 404:  # the definition is gone, and its resources with it
                    raise
                continue
            for each in items:
                metadata = each["metadata"]
                found.append(f"{plural}/{metadata['name']} in {metadata['namespace']}")
    return found


def main(namespaces: list[str], api: ClusterApi | None = None) -> int:
    """Return the exit code."""
    found = remaining(api or ClusterApi(), namespaces)
    for each in found:
        print(each)
    if not found:
        print("no bus and no entity is left")
        return 0
    print(
        f"{len(found)} resources are left; without the operator their deletion would wait for ever."
        " Delete them first, or uninstall with --no-hooks"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
