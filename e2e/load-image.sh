#!/usr/bin/env bash
# Load image archives, of docker or OCI, into the nodes of the cluster of E2E_CLUSTER.
#
#   e2e/load-image.sh broker.tar operator.tar
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
for archive in "$@"; do
  cluster_load_image "$archive"
done
