#!/usr/bin/env bash
# Run the end-to-end tests against the cluster of KUBECONFIG, those beside each other that can be:
# most of their time they wait. Arguments are pytest's.
#
#   e2e/run.sh e2e/suite.sh -k deletion
#
# E2E_WORKERS is the number of tests that run at once (6).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
python=${PYTHON:-$e2e/../.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export E2E_FIGURES=$scratch/figures
export E2E_KEEP_OPERATOR=1  # from one stage to the next
failed=0

stage() { # <marker expression> <pytest arguments>...
  local status=0 chosen=$1
  shift
  "$python" -m pytest "$e2e/tests" -m "$chosen" "$@" || status=$?
  ((status == 0 || status == 5)) || failed=$status  # 5: none of its tests is wanted
}

is_installed() { helm status postbus --namespace postbus-system >/dev/null 2>&1; }

no_bus_is_left() { [[ -z $(kubectl get postbus --all-namespaces --output=name) ]]; }

is_installed && was_installed=1 || was_installed=
stage "alone and not slow" "$@"
stage "not alone and not last and not slow" --numprocesses "${E2E_WORKERS:-6}" \
  --dist loadfile --no-loadscope-reorder "$@"
stage "last and not slow" "$@"
if [[ -z $was_installed ]] && is_installed; then
  wait_for 120 "deleted buses" no_bus_is_left
  helm uninstall postbus --namespace postbus-system
fi
[[ ! -s $E2E_FIGURES ]] || { echo "measured:"; cat "$E2E_FIGURES"; }
exit "$failed"
