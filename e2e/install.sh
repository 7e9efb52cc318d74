#!/usr/bin/env bash
# Install Debian packages that clusters and images of the end-to-end tests need.
#
#   e2e/install.sh node                    the container runtime and tools of the own node
#   e2e/install.sh images                  builders of container images
#   e2e/install.sh kind                    docker
#   e2e/install.sh metrics                 prometheus and promtool: only these programs, into
#                                          $E2E_CACHE/bin, since the package starts a server
#
# What is there already needs no network.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=${E2E_CACHE:-$here/.cache}/bin
declare -A groups=(
  [node]='busybox-static containerd containernetworking-plugins conntrack ipset iproute2 iptables
    kmod procps python3 runc util-linux'
  [images]='buildah mmdebstrap'
  [kind]='docker.io'
  [metrics]=''
)

is_installed() { # <package>
  [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null) = installed ]]
}

extract_prometheus() {
  local folder
  echo "extracting prometheus and promtool" >&2
  folder=$(mktemp -d)
  apt-get update -qq
  (
    cd "$folder"
    apt-get download -qq -o APT::Sandbox::User=root prometheus
    dpkg-deb --extract prometheus_*.deb .
  )
  install -D --target-directory "$bin" "$folder"/usr/bin/{prometheus,promtool}
  rm -r "$folder"
}

command -v dpkg-query >/dev/null || {
  echo "$0: not a Debian machine: install yourself: ${groups[$1]}" >&2
  exit 77
}
for group in "$@"; do
  [[ -v groups[$group] ]] || { echo "$0: unknown group $group: ${!groups[*]}" >&2; exit 2; }
done
[[ " $* " != *' metrics '* || -x $bin/promtool ]] || extract_prometheus
missing=()
for group in "$@"; do
  for package in ${groups[$group]}; do
    is_installed "$package" || missing+=("$package")
  done
done
[[ ${#missing[@]} != 0 ]] || exit 0
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq --no-install-recommends "${missing[@]}" >/dev/null
