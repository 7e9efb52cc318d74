#!/usr/bin/env bash
# Start a cluster of E2E_CLUSTER beside those that run, end it, and show what it left on the
# machine; fails if anything: namespaces, mounts, cgroups, network devices, settings of the kernel,
# files of the system. On a machine where nothing else starts meanwhile.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"

snapshot() {
  lsns --noheadings --raw --output TYPE,NS | grep -v '^user '
  findmnt --noheadings --raw --output TARGET,SOURCE
  find /sys/fs/cgroup -type d -not -path '*/process_api/*'
  ip -oneline link | cut -d: -f2
  # Counters and random numbers change by themselves.
  sysctl --all 2>/dev/null |
    grep -E '^(kernel|vm|net)\.' |
    grep -vE 'random|ns_last_pid|_nr|nr_|stat|count|/proc/sys/fs'
  find /etc /opt /run /usr /var -xdev -not -path '/var/log/*' -not -path '/var/lib/apt/*'
}

cluster_prepare
export E2E_STATE
E2E_STATE=$(mktemp -d)
trap 'rm -rf "$E2E_STATE"' EXIT
snapshot | sort >"$E2E_STATE/before"
"$e2e/up.sh"
"$e2e/down.sh"
snapshot | sort >"$E2E_STATE/after"
comm -13 "$E2E_STATE/before" "$E2E_STATE/after" >"$E2E_STATE/left"
[[ ! -s $E2E_STATE/left ]] || fail "the cluster left on the machine: $(<"$E2E_STATE/left")"
echo "nothing is left"
