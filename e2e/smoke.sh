#!/usr/bin/env bash
# The shortest proof that the cluster of KUBECONFIG runs buses: install, message, pod kill, uninstall.
# On the own node five faults follow, under clients. Arguments are pytest's.
#
#   e2e/test.sh e2e/smoke.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
python=${PYTHON:-$e2e/../.venv/bin/python}
"$python" -m pytest "$e2e/tests" -m smoke "$@"
[[ ${E2E_CLUSTER:-node} == node ]] || exit 0
"$python" -m e2e.faults.run --faults 5 --seed 1 \
  --only broker-kill,store-delete,leader-force-delete,operator-away-update,etcd-restart
