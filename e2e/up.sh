#!/usr/bin/env bash
# Start the cluster of E2E_CLUSTER and wait until it runs pods; build what is missing first.
#
#   e2e/up.sh                              our own node: Kubernetes from Go modules, as root
#   E2E_CLUSTER=kind e2e/up.sh             kind, with the docker of this machine if it has one
#   E2E_CLUSTER=existing e2e/up.sh         check the cluster of KUBECONFIG
#
# Exits with 77 and a sentence where this machine cannot run it. e2e/README.md has more.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
lock_clusters
cluster_up
