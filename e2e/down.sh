#!/usr/bin/env bash
# End the cluster of E2E_CLUSTER and remove what it wrote; E2E_KEEP=1 keeps its files and logs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
lock_clusters
cluster_down
