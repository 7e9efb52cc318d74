#!/usr/bin/env bash
# Upgrade a bus from an older commit to this one and back, with clients at work, on a new cluster of
# E2E_CLUSTER, and write the times.
#
#   make e2e-upgrade                       from the commit below
#   FROM=<commit> make e2e-upgrade         from another one, which must be here
#
# Arguments are pytest's. Three versions are built, each by its own script: FROM with its charts and
# definitions; the files that are here; and these with one more step of the schema, which a broker of
# the version before must refuse.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
top=$(dirname "$e2e")
# The end of the operator's first round: the oldest commit with which the whole suite passed. Since
# then definitions, chart, operator, broker and images have changed, and the schema has not.
FROM=${FROM:-ed4e6ca}
commit=$(git -C "$top" rev-parse --verify --quiet "$FROM^{commit}") ||
  fail "the commit $FROM is not here: fetch the history, or set FROM"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/from" "$scratch/next"

git -C "$top" archive "$commit" | tar -x -C "$scratch/from"
git -C "$top" ls-files -z --cached --others --exclude-standard |
  tar -c -C "$top" --null --files-from=- --ignore-failed-read | tar -x -C "$scratch/next"
cat >"$scratch/next/dataplane/postbus/store/migrations/9001_post_next.sql" <<'SQL'
-- scope: partition
comment on table owner is 'of the next version';
SQL

export E2E_FROM=$scratch/from E2E_NEXT=$scratch/next
E2E_TREES="upgrade-from=$E2E_FROM upgrade-next=$E2E_NEXT" \
  "$e2e/test.sh" "${PYTHON:-$top/.venv/bin/python}" -m pytest -x "$e2e/tests/test_upgrade.py" "$@"
