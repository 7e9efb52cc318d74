#!/usr/bin/env bash
# Write the root file system of a node image for kind, unless it is there: Debian's packages, the
# programs of Kubernetes built here, the files of kind's own node image, and an archive of each
# container image that kubeadm and kind start. It goes to $E2E_CACHE/images/kind-node.tar.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"
. "$e2e/image.sh"
archive=$images/kind-node.tar
packages=usr-is-merged,systemd,systemd-sysv,dbus,containerd,runc,containernetworking-plugins,conntrack,iptables
packages+=,nftables,iproute2,ethtool,socat,mount,kmod,jq,procps,hostname,ca-certificates,pigz
version=$(kubeadm version -o short)
mapfile -t kubeadm_images < <(kubeadm config images list --kubernetes-version "$version")

main() {
  lock_images
  ! is_made_from "$archive" "$bin"/.*.lock "$e2e"/{image.sh,image_archive.py,keep-sysctls.sh} \
    "$e2e"/kind/* "$e2e/node/config/cni.conflist" "$e2e/node/manifests/storage.yaml" || exit 0
  echo "making a node image for kind" >&2
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir "$work/files"
  add_files_of_kind
  add_programs
  add_images
  add_manifests
  mmdebstrap --quiet --variant=minbase --format=tar --include="$packages" \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --customize-hook="sync-in '$work/files' /" --customize-hook="$e2e/kind/set-up-units.sh" \
    bookworm "$archive.part" >"$images/kind-node.log" 2>&1 ||
    { tail "$images/kind-node.log" >&2; fail "mmdebstrap could not make a node image"; }
  mv "$archive.part" "$archive"
  mark_as_made "$archive"
}

put() { # <mode> <file> <path in the image>
  install -D --mode "$1" "$2" "$work/files/$3"
}

add_files_of_kind() {
  local source path
  source=$(cd "$e2e/tools" && go list -mod=readonly -m -f '{{.Dir}}' sigs.k8s.io/kind)
  source+=/images/base/files
  while read -r path; do
    case $path in
      */bin/*) put 0755 "$source/$path" "$path" ;;
      *) put 0644 "$source/$path" "$path" ;;
    esac
  done < <(cd "$source" && find . -type f)
}

add_programs() {
  local program
  for program in kubeadm kubectl kubelet; do
    put 0755 "$bin/$program" "usr/bin/$program"
  done
  put 0755 "$e2e/keep-sysctls.sh" kind/bin/keep-sysctls.sh
  printf %s "$version" >"$work/files/kind/version"
}

# They are imported when a node starts: images that lie unpacked on overlayfs cannot be run on it.
add_images() {
  local image program
  mkdir -p "$work/files/kind/images"
  for image in "${kubeadm_images[@]}"; do
    program=${image##*/}
    program=${program%:*}
    new_image
    add_program "$program" "$bin/$program"
    [[ $program != kube-proxy ]] || add_iptables
    save_image "$work/files/kind/images/$program.tar" "$image" "$program"
  done
  cp "$images"/{busybox,local-path-provisioner}.tar "$work/files/kind/images"
}

add_manifests() {
  local manifests=$work/files/kind/manifests pause
  pause=$(printf '%s\n' "${kubeadm_images[@]}" | grep /pause:)
  mkdir -p "$manifests"
  sed "s|@PAUSE@|$pause|" "$e2e/kind/containerd.toml" >"$work/files/etc/containerd/config.toml"
  sed 's|/run/e2e/volumes|/var/local-path-provisioner|' "$e2e/node/manifests/storage.yaml" \
    >"$manifests/default-storage.yaml"
  sed -e "s|@CNI@|$(tr -d '\n' <"$e2e/node/config/cni.conflist")|" \
    "$e2e/kind/network.yaml" >"$manifests/default-cni.yaml"
}

main
