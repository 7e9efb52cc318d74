#!/usr/bin/env bash
# Let kubelet find the sysctls that it sets for the whole machine as it wants them, in files that
# cover the real ones for the processes of these mounts.
set -euo pipefail
files=/run/sysctl
mkdir -p $files
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  path=/proc/sys/${setting%=*} value=${setting#*=}
  [[ $(<"$path") != "$value" ]] || continue
  echo "$value" >"$files/${path//\//.}"
  mount --bind "$files/${path//\//.}" "$path"
done
