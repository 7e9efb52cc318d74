# A process tree in namespaces of its own: mounts, processes, network without uplink, host name, IPC.
# Ending its first process ends all of it; only its cgroups and the files in $state remain.
# shellcheck shell=bash

unique=postbus-e2e-$(cksum <<<"$state" | cut -d' ' -f1)
sandbox=$E2E_STATE/$E2E_CLUSTER.pid   # of `unshare`, which lives as long as the first process

sandbox_require() {
  [[ $EUID = 0 ]] || fail "E2E_CLUSTER=$E2E_CLUSTER needs root" 77
  unshare --mount --pid --net --uts --ipc --fork --mount-proc true 2>/dev/null ||
    fail "E2E_CLUSTER=$E2E_CLUSTER needs a machine that allows namespaces" 77
}

sandbox_is_up() {
  [[ -s $sandbox ]] && grep -qsF "$e2e" "/proc/$(<"$sandbox")/cmdline"
}

sandbox_start() { # <program to be the first process>
  mkdir -p "$state/log"
  setsid unshare --mount --propagation private --pid --net --uts --ipc --fork --kill-child \
    --mount-proc "$1" >"$state/log/init.log" 2>&1 </dev/null 8<&- &
  echo $! >"$sandbox"
  wait_for 10 "namespaces; their log: $state/log/init.log" sandbox_is_up
}

# Run a command in the network of the sandbox; its files and processes are those of the caller.
sandbox_reach() {
  sandbox_is_up || fail "no cluster is up: run e2e/up.sh"
  nsenter --target "$(<"$sandbox")" --net -- "$@"
}

# Run a command with network and mounts of the sandbox.
sandbox_enter() {
  sandbox_is_up || fail "no cluster is up: run e2e/up.sh"
  nsenter --target "$(<"$sandbox")" --net --mount --wdns="$PWD" -- "$@"
}

sandbox_stop() {
  if sandbox_is_up; then
    pkill -KILL --parent "$(<"$sandbox")" || true
    wait_for 30 "end of the cluster's processes" sandbox_is_down
  fi
  wait_for 30 "removal of the cluster's cgroups" sandbox_remove_cgroups
  [[ -n ${E2E_KEEP:-} ]] || rm -rf --one-file-system "$state"
  rm -f "$sandbox"
  rmdir --ignore-fail-on-non-empty "$E2E_STATE" 2>/dev/null || true
}

sandbox_is_down() {
  ! sandbox_is_up
}

# Cgroups are the machine's: one tree in each hierarchy of version 1, or one in version 2.
sandbox_cgroups() {
  find /sys/fs/cgroup -maxdepth 2 -type d -name "$unique"
}

sandbox_remove_cgroups() {
  local tree
  for tree in $(sandbox_cgroups); do
    find "$tree" -depth -type d -exec rmdir {} +
  done
}
