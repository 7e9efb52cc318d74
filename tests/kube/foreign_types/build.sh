#!/usr/bin/env bash
# Build the program that decodes manifests with the Go types of other operators, and keep the
# definitions of their custom resources from the same modules, locked by go.sum.
#
# They go to $E2E_CACHE/bin/foreign-types and $E2E_CACHE/foreign-definitions, by default in
# e2e/.cache; what is there from the same files stays. Go is the one on PATH, or that of
# e2e/build-tools.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=$(realpath -m "${E2E_CACHE:-$here/../../../e2e/.cache}")
program=$cache/bin/foreign-types
definitions=$cache/foreign-definitions

mkdir -p "$cache/bin"
cd "$here"
exec 9>"$cache/bin/.foreign-types.building"
flock 9
lock=$(cat build.sh go.mod go.sum ./*.go ./*/*.go | sha256sum)
[[ $lock != "$(cat "$cache/bin/.foreign-types.lock" 2>/dev/null)" ]] || exit 0
command -v go >/dev/null || PATH=$cache/go/go/bin:$PATH
# The flags of e2e/build-tools.sh: what both need is compiled once.
export CGO_ENABLED=0 GOFLAGS='-mod=readonly -buildvcs=false' GOTOOLCHAIN=local
echo "building foreign-types" >&2

folder_of() { # <module>
  go mod download "$1"
  go list -m -f '{{.Dir}}' "$1"
}

# Their packages also have webhooks, on client-go and the typed clients of all of Kubernetes: two
# minutes of compiling. So only files with types are compiled, as packages of this module.
keda=$(folder_of github.com/kedacore/keda/v2)
cnpg=$(folder_of github.com/cloudnative-pg/cloudnative-pg)
certmanager=$(folder_of github.com/cert-manager/cert-manager)
overlay=$(mktemp)
trap 'rm "$overlay"' EXIT
{
  echo '{"Replace": {'
  for file in "$keda"/apis/keda/v1alpha1/{*_types,identifier}.go; do
    [[ $file = */withtriggers_types.go ]] || echo "\"$here/keda/${file##*/}\": \"$file\","
  done
  for file in "$cnpg"/api/v1/*_types.go; do
    echo "\"$here/cnpg/${file##*/}\": \"$file\","
  done
  echo "\"$here/keda/none.go\": \"\"}}"
} >"$overlay"
go build -overlay "$overlay" -trimpath -ldflags '-s -w' -o "$program.new" .
mv "$program.new" "$program"
mkdir -p "$definitions"
install -m 644 --target-directory "$definitions" \
  "$keda"/config/crd/bases/keda.sh_{scaledobjects,triggerauthentications}.yaml \
  "$cnpg"/config/crd/bases/postgresql.cnpg.io_clusters.yaml \
  "$certmanager"/deploy/crds/cert-manager.io_{certificates,issuers}.yaml
echo "$lock" >"$cache/bin/.foreign-types.lock"
