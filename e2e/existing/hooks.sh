# E2E_CLUSTER=existing: the cluster of KUBECONFIG, whoever runs it.
# shellcheck shell=bash
[[ -n ${KUBECONFIG:-} ]] || fail "E2E_CLUSTER=existing needs KUBECONFIG" 2

cluster_prepare() {
  :
}

cluster_up() {
  kubectl get --raw /readyz >/dev/null
}

cluster_down() {
  :
}

cluster_load_image() { # <archive>
  [[ -n ${E2E_LOAD:-} ]] ||
    fail "E2E_LOAD is not set: name a command that loads an archive, as 'minikube image load'" 2
  $E2E_LOAD "$1"
}

cluster_run() {
  "$@"
}
