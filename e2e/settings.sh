# Settings of all scripts of this folder; the environment overrides each E2E_… variable.
# shellcheck shell=bash disable=SC2034
umask 022  # images and what pods read are not for their owner alone
e2e=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
E2E_CLUSTER=${E2E_CLUSTER:-node}           # node, kind or existing
# Programs and images that were built; kept.
E2E_CACHE=$(realpath -m "${E2E_CACHE:-$e2e/.cache}")
# Files of running clusters: one cluster of each kind in each such folder.
E2E_STATE=$(realpath -m "${E2E_STATE:-$e2e/.state}")
export E2E_CLUSTER E2E_CACHE E2E_STATE
bin=$E2E_CACHE/bin
images=$E2E_CACHE/images
state=$E2E_STATE/$E2E_CLUSTER
export PATH=$bin:$PATH:/usr/sbin:/sbin

fail() { # <sentence> [<exit code>]
  echo "$1" >&2
  exit "${2:-1}"
}

# Print the comment at the beginning of a script when its caller asks for help.
help_for() { # <script> <arguments>...
  [[ ${2:-} = --help || ${2:-} = -h ]] || return 0
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$1"
  exit 0
}

# Wait until no other cluster of this folder is being started or ended.
lock_clusters() {
  exec 8<"$e2e"
  flock 8
}

# Call a command until it succeeds.
wait_for() { # <seconds> <name> <command>...
  local end=$((SECONDS + $1)) name=$2
  shift 2
  until ("$@") >/dev/null 2>&1; do
    ((SECONDS < end)) || fail "not ready in time: $name"
    sleep 0.1
  done
}

case $E2E_CLUSTER in
  node | kind | existing) . "$e2e/$E2E_CLUSTER/hooks.sh" ;;
  *) fail "E2E_CLUSTER=$E2E_CLUSTER: expected node, kind or existing" 2 ;;
esac
