#!/usr/bin/env bash
# First process of the node's namespaces: prepares them, then runs the programs of Kubernetes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"
. "$e2e/first_process.sh"
config=$e2e/node/config

main() {
  prepare_mounts
  install -D --mode 0644 "$config/cni.conflist" /run/e2e/cni/10-e2e.conflist
  prepare_network
  prepare_cgroups
  "$e2e/keep-sysctls.sh"
  start_control_plane
  start_node
  wait
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
  # At its default of 20 requests a second it starts its controllers for five seconds.
  keep_running kube-controller-manager kube-controller-manager \
    $(kubeconfigs controller-manager) --leader-elect=false --kube-api-qps=200 --kube-api-burst=400 \
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
  keep_running kubelet kubelet --config="$config/kubelet.yaml" --cgroup-root="/$unique" \
    --kubeconfig=/run/e2e/kubernetes/kubelet.conf --root-dir=/run/e2e/kubelet \
    --hostname-override=e2e-node --node-ip=10.231.0.2
  keep_running kube-proxy kube-proxy --config="$config/kube-proxy.yaml"
  local image
  for image in coredns local-path-provisioner busybox; do
    ctr --namespace k8s.io images import "$images/$image.tar"
  done
  touch /run/e2e/images.imported
}

main
