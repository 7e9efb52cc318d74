# What first processes of namespaces do: prepare them, and keep programs running.
# shellcheck shell=bash

# Files of the cluster are at /run/e2e within, so that paths are the same everywhere.
prepare_mounts() {
  # kubelet and docker pass mounts on to containers; none of them reaches the machine.
  mount --make-rshared /
  mount -t tmpfs -o mode=0755 tmpfs /run
  mkdir -p /run/lock /run/etcd /run/e2e
  mount --bind "$state" /run/e2e
  write_to_memory var   # by kubelet, CNI
  write_to_memory usr   # /lib/modules by docker
}

# Some programs write to fixed places of the system.
write_to_memory() { # <folder of the root>
  mkdir -p "/run/system/$1"/{upper,work}
  mount -t overlay overlay "/$1" \
    -o "lowerdir=/$1,upperdir=/run/system/$1/upper,workdir=/run/system/$1/work"
}

prepare_network() {
  hostname "e2e-$E2E_CLUSTER"
  # No name server can be reached: without one other names fail at once.
  : >/run/resolv.conf
  mount --bind /run/resolv.conf /etc/resolv.conf
  # Addresses of Services need a route before they are rewritten; it leads to nowhere.
  ip link set lo up
  ip link add uplink type veth peer name nowhere
  ip address add 10.231.0.2/24 dev uplink
  ip link set uplink up
  ip link set nowhere up
  ip route add default dev uplink
  sysctl --quiet --write net.ipv4.ip_forward=1
}

# The root of all cgroups of the cluster has to exist in every hierarchy. Without a weight all pods
# together would get the processor time of one process of this machine, such as a test beside them.
prepare_cgroups() {
  local hierarchy
  if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p "/sys/fs/cgroup/$unique"
    sed 's/\(^\| \)/\1+/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
    echo 2000 >"/sys/fs/cgroup/$unique/cpu.weight"
    return
  fi
  for hierarchy in /sys/fs/cgroup/*/; do
    mkdir -p "$hierarchy$unique"
  done
  cat /sys/fs/cgroup/cpuset/cpuset.cpus >"/sys/fs/cgroup/cpuset/$unique/cpuset.cpus"
  cat /sys/fs/cgroup/cpuset/cpuset.mems >"/sys/fs/cgroup/cpuset/$unique/cpuset.mems"
  echo 20480 >"/sys/fs/cgroup/cpu/$unique/cpu.shares"
}

# Run a program in the background and start it again whenever it ends.
keep_running() { # <name of its log> <command>...
  local log=/run/e2e/log/$1.log
  shift
  while :; do
    "$@" || echo "$1 ended with $?"
    sleep 0.2
  done >"$log" 2>&1 &
}
