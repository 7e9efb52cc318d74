#!/usr/bin/env bash
# Install Debian packages that clusters and images of the end-to-end tests need.
#
#   e2e/install.sh node                    the container runtime and tools of the own node
#   e2e/install.sh images                  builders of container images
#   e2e/install.sh kind                    docker
#
# What is there already needs no network.
set -euo pipefail
declare -A groups=(
  [node]='busybox-static containerd containernetworking-plugins conntrack ipset iproute2 iptables
    kmod procps python3 runc util-linux'
  [images]='buildah mmdebstrap'
  [kind]='docker.io'
)

is_installed() { # <package>
  [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null) = installed ]]
}

command -v dpkg-query >/dev/null || {
  echo "$0: not a Debian machine: install yourself: ${groups[$1]}" >&2
  exit 77
}
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
