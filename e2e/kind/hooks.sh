# E2E_CLUSTER=kind: kind with the docker of this machine and its stock node image; without docker,
# with one in namespaces of its own and a node image that is made here.
# shellcheck shell=bash
. "$e2e/namespaces.sh"
export KUBECONFIG=$state/kubeconfig
kind_image=${E2E_KIND_IMAGE:-}
test_image=e2e.local/busybox:1

cluster_up() {
  if kind_is_up; then
    echo "already up: $state"
    return
  fi
  cluster_prepare
  docker_answers || kind_start_docker
  mkdir -p "$state"
  with_docker kind create cluster --name "$unique" --kubeconfig "$KUBECONFIG" --wait 120s \
    ${kind_image:+--image "$kind_image"}
  kind_load_test_image
}

kind_is_up() {
  [[ -s $KUBECONFIG ]] && with_docker kind get clusters 2>/dev/null | grep -qx "$unique"
}

# Install and build what is missing.
cluster_prepare() {
  if docker_answers; then
    type -P kind >/dev/null || "$e2e/build-tools.sh" kind
    return
  fi
  sandbox_require
  "$e2e/install.sh" node images kind
  "$e2e/build-tools.sh" kind
  "$e2e/system-images.sh"
  "$e2e/kind/node-image.sh"
}

docker_answers() {
  docker info >/dev/null 2>&1
}

kind_start_docker() {
  sandbox_stop
  sandbox_start "$e2e/kind/init.sh"
  wait_for 60 "docker; its log: $state/log/dockerd.log" sandbox_enter docker info
  kind_image=e2e.local/kind-node:1
  sandbox_enter docker import --change 'ENV container=docker' \
    --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' \
    "$images/kind-node.tar" "$kind_image" >/dev/null
}

kind_load_test_image() {
  if sandbox_is_up; then
    cluster_load_image "$images/busybox.tar"
  else
    docker image inspect "$test_image" >/dev/null 2>&1 ||
      { docker pull --quiet busybox && docker tag busybox "$test_image"; }
    kind load docker-image --name "$unique" "$test_image"
  fi
}

cluster_down() {
  if sandbox_is_up || [[ -n $(sandbox_cgroups) ]]; then
    sandbox_require
  elif [[ -s $KUBECONFIG ]]; then
    kind delete cluster --name "$unique" --kubeconfig "$KUBECONFIG"
  fi
  sandbox_stop
}

cluster_load_image() { # <archive>
  with_docker kind load image-archive --name "$unique" "$1"
}

cluster_run() {
  if sandbox_is_up; then
    sandbox_reach "$@"
  else
    "$@"
  fi
}

# Run a command that uses docker: that of the namespaces if it runs.
with_docker() {
  if sandbox_is_up; then
    sandbox_enter env --unset DOCKER_HOST "$@"
  else
    "$@"
  fi
}
