#!/usr/bin/env bash
# First process of docker's namespaces: prepares them, then runs docker and a name server.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"
. "$e2e/first_process.sh"

main() {
  prepare_mounts
  prepare_network
  prepare_cgroups
  # Other names do not exist; docker would ask public name servers.
  keep_running coredns coredns -conf "$e2e/kind/Corefile"
  keep_running dockerd dockerd --data-root /run/e2e/docker --cgroup-parent "/$unique" \
    --exec-opt native.cgroupdriver=cgroupfs --dns 10.231.0.2 --oom-score-adjust 0 \
    --add-runtime "e2e=$e2e/kind/runc.py" --default-runtime e2e
  wait
}

main
