#!/usr/bin/env bash
# Write archives of the images that the cluster itself needs, each of one program: pause, CoreDNS,
# local-path-provisioner, and busybox, which makes folders for volumes and serves as a test image.
# They go to $E2E_CACHE/images.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

write_image() { # <name> <program> [<another name of the program>...]
  local archive=$images/$1.tar program=$2 tree name
  [[ ! $archive -nt $program || ! $archive -nt $e2e/image_archive.py ]] || return 0
  tree=$(mktemp -d)
  mkdir -p "$tree/bin" "$tree/tmp"
  install -m 0755 "$program" "$tree/bin/$1"
  for name in "${@:3}"; do
    [[ $name = "$1" ]] || ln -s "$1" "$tree/bin/$name"
  done
  python3 "$e2e/image_archive.py" "$archive" "e2e.local/$1:1" "$tree" "/bin/$1"
  rm -r "$tree"
}

mkdir -p "$images"
for name in pause coredns local-path-provisioner; do
  write_image "$name" "$bin/$name"
done
mapfile -t applets < <(busybox --list)
write_image busybox "$(type -P busybox)" "${applets[@]}"
