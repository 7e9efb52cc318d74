# E2E_CLUSTER=node: a node of Kubernetes in namespaces of this machine.
# shellcheck shell=bash
. "$e2e/namespaces.sh"
export KUBECONFIG=$state/kubeconfig

cluster_up() {
  if sandbox_is_up; then
    echo "already up: $state"
    return
  fi
  cluster_prepare
  sandbox_stop
  sandbox_start "$e2e/node/init.sh"
  trap 'tail -n 5 "$state"/log/*.log >&2; echo "the node did not start; its logs: $state/log" >&2' EXIT
  node_wait_until_ready
  trap - EXIT
}

# Install and build what is missing.
cluster_prepare() {
  sandbox_require
  "$e2e/install.sh" node
  "$e2e/build-tools.sh" node
  "$e2e/system-images.sh"
}

node_wait_until_ready() {
  lap "started"
  wait_for 60 "API server" cluster_run kubectl get --raw /readyz
  lap "API server ready"
  wait_for 60 "registration of the node" cluster_run kubectl get node e2e-node
  cluster_run kubectl create -f "$e2e/node/manifests" >/dev/null
  wait_for 60 "images" test -e "$state/images.imported"
  lap "system images loaded"
  cluster_run kubectl wait --for=condition=Ready node/e2e-node --timeout=60s >/dev/null
  lap "node ready"
  cluster_run kubectl -n kube-system wait --for=condition=Available deployment --all \
    --timeout=60s >/dev/null
  lap "DNS and storage ready"
}

lap() { # <event>
  printf '%3d s  %s\n' "$SECONDS" "$1"
}

cluster_down() {
  sandbox_require
  sandbox_stop
}

cluster_load_image() { # <archive>
  sandbox_enter "$(type -P ctr)" --namespace k8s.io images import - <"$1"
}

cluster_run() {
  sandbox_reach "$@"
}
