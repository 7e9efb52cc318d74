#!/usr/bin/env bash
# Run a command where it reaches the cluster of E2E_CLUSTER, with KUBECONFIG set and our kubectl
# and helm on PATH. On our own node it also reaches addresses of Services and pods.
#
#   e2e/run.sh kubectl get pods -A
#   e2e/run.sh .venv/bin/python -m pytest e2e/tests
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
cluster_run "$@"
