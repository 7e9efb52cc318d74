#!/usr/bin/env bash
# First process of the node's namespaces: prepares them, then runs the programs of Kubernetes.
# Within, the node's files are at /run/e2e, so that configuration and paths are the same everywhere.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"
config=$e2e/node/config

main() {
  prepare_mounts
  prepare_network
  prepare_cgroups
  keep_sysctls
  start_control_plane
  start_node
  wait
}

prepare_mounts() {
  # kubelet passes mounts on to containerd; none of them reaches the machine.
  mount --make-rshared /
  mount -t tmpfs -o mode=0755 tmpfs /run
  mkdir -p /run/lock /run/etcd /run/e2e
  mount --bind "$state" /run/e2e
  install -D --mode 0644 "$config/cni.conflist" /run/e2e/cni/10-e2e.conflist
  # kubelet and CNI write to fixed places below /var: into memory.
  mkdir -p /run/var/upper /run/var/work
  mount -t overlay -o lowerdir=/var,upperdir=/run/var/upper,workdir=/run/var/work overlay /var
}

prepare_network() {
  hostname e2e-node
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

# kubelet wants the root of its cgroups to exist in every hierarchy.
prepare_cgroups() {
  local hierarchy
  if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p "/sys/fs/cgroup/$cgroup"
    sed 's/\(^\| \)/\1+/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
    return
  fi
  for hierarchy in /sys/fs/cgroup/*/; do
    mkdir -p "$hierarchy$cgroup"
  done
  cat /sys/fs/cgroup/cpuset/cpuset.cpus >"/sys/fs/cgroup/cpuset/$cgroup/cpuset.cpus"
  cat /sys/fs/cgroup/cpuset/cpuset.mems >"/sys/fs/cgroup/cpuset/$cgroup/cpuset.mems"
}

# kubelet sets these for the whole machine unless it finds them set: let it find files that say so.
keep_sysctls() {
  local setting path
  mkdir -p /run/sysctl
  for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    path=${setting%=*}
    echo "${setting#*=}" >"/run/sysctl/${path//\//.}"
    mount --bind "/run/sysctl/${path//\//.}" "/proc/sys/$path"
  done
}

start_control_plane() {
  local pki=/run/e2e/pki
  keep_running etcd etcd --data-dir /run/etcd --unsafe-no-fsync
  keep_running containerd containerd --config "$config/containerd.toml"
  write_certificates
  keep_running kube-apiserver kube-apiserver \
    --advertise-address=10.231.0.2 --service-cluster-ip-range=10.96.0.0/16 \
    --etcd-servers=http://127.0.0.1:2379 --allow-privileged=true \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
    --audit-policy-file="$config/audit.yaml" --audit-log-path=/run/e2e/log/audit.jsonl \
    --client-ca-file=$pki/ca.crt \
    --tls-cert-file=$pki/apiserver.crt --tls-private-key-file=$pki/apiserver.key \
    --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate=$pki/apiserver-kubelet-client.crt \
    --kubelet-client-key=$pki/apiserver-kubelet-client.key \
    --proxy-client-cert-file=$pki/front-proxy-client.crt \
    --proxy-client-key-file=$pki/front-proxy-client.key \
    --requestheader-client-ca-file=$pki/front-proxy-ca.crt \
    --requestheader-allowed-names=front-proxy-client \
    --requestheader-username-headers=X-Remote-User --requestheader-group-headers=X-Remote-Group \
    --requestheader-extra-headers-prefix=X-Remote-Extra- \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file=$pki/sa.pub --service-account-signing-key-file=$pki/sa.key
  keep_running kube-controller-manager kube-controller-manager \
    $(kubeconfigs controller-manager) --leader-elect=false \
    --allocate-node-cidrs=true --cluster-cidr=10.244.0.0/16 \
    --service-cluster-ip-range=10.96.0.0/16 --use-service-account-credentials=true \
    --client-ca-file=$pki/ca.crt --requestheader-client-ca-file=$pki/front-proxy-ca.crt \
    --cluster-signing-cert-file=$pki/ca.crt --cluster-signing-key-file=$pki/ca.key \
    --root-ca-file=$pki/ca.crt --service-account-private-key-file=$pki/sa.key
  keep_running kube-scheduler kube-scheduler $(kubeconfigs scheduler) --leader-elect=false
}

kubeconfigs() { # <component>
  local file=/run/e2e/kubernetes/$1.conf
  echo "--kubeconfig=$file --authentication-kubeconfig=$file --authorization-kubeconfig=$file"
}

write_certificates() {
  local folder=/run/e2e/kubernetes file=/run/e2e/kubernetes/kubeadm.yaml
  mkdir -p $folder
  { cat "$config/kubeadm.yaml" && echo "kubernetesVersion: $(kubeadm version -o short)"; } >$file
  kubeadm init phase certs all --config $file
  kubeadm init phase kubeconfig all --config $file --kubeconfig-dir $folder
  kubeadm kubeconfig user --config $file --client-name system:kube-proxy >$folder/kube-proxy.conf
  cp $folder/super-admin.conf /run/e2e/kubeconfig
}

start_node() {
  wait_for 30 containerd ctr version
  # kubelet asks for the pause image first.
  ctr --namespace k8s.io images import "$images/pause.tar"
  keep_running kubelet kubelet --config="$config/kubelet.yaml" --cgroup-root="/$cgroup" \
    --kubeconfig=/run/e2e/kubernetes/kubelet.conf --root-dir=/run/e2e/kubelet \
    --hostname-override=e2e-node --node-ip=10.231.0.2
  keep_running kube-proxy kube-proxy --config="$config/kube-proxy.yaml"
  local image
  for image in coredns local-path-provisioner busybox; do
    ctr --namespace k8s.io images import "$images/$image.tar"
  done
  touch /run/e2e/images.imported
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

main
