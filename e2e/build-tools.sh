#!/usr/bin/env bash
# Build programs of Kubernetes from Go modules, locked by e2e/tools/go.sum.
#
#   e2e/build-tools.sh                     what is missing of etcd, kube-apiserver, kubectl
#   e2e/build-tools.sh kubectl             only this one
#
# They go to $E2E_CACHE/bin, by default e2e/.cache/bin. Needs Go 1.25; from nothing it takes five
# minutes on two cores, 1 GB of modules and 2 GB of build cache.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=${E2E_CACHE:-$here/.cache}/bin
[[ $# != 0 ]] || set -- etcd kube-apiserver kubectl

command -v go >/dev/null || {
  echo "$0: go is not on PATH: install Go 1.25 or later" >&2
  exit 77
}
cd "$here/tools"
export CGO_ENABLED=0 GOFLAGS='-mod=readonly -buildvcs=false' GOTOOLCHAIN=local
mkdir -p "$bin"

# Without a version kubectl and the API server would say v0.0.0-master and refuse each other.
version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${version#v1.}
minor=${minor%%.*}
stamps=
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  stamps+=" -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$minor"
  stamps+=" -X $package.gitTreeState=clean -X $package.buildDate=1970-01-01T00:00:00Z"
done

for name in "$@"; do
  case $name in
    etcd) package=go.etcd.io/etcd/server/v3 ;;
    kube*) package=k8s.io/kubernetes/cmd/$name ;;
    *) echo "$0: unknown program $name" >&2; exit 2 ;;
  esac
  # A lock file that is newer than the program may name another version.
  [[ -x $bin/$name && $bin/$name -nt go.sum ]] && continue
  echo "building $name" >&2
  go build -trimpath -ldflags "-s -w$stamps" -o "$bin/$name" "$package"
done
