#!/usr/bin/env bash
# Write archives of the images that the cluster itself needs, each of one program: pause, CoreDNS,
# local-path-provisioner, and busybox, which makes folders for volumes and serves as a test image.
# They go to $E2E_CACHE/images.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
. "$e2e/image.sh"

write_image() { # <name> <program> <file that changes with it>
  local archive=$images/$1.tar applet
  ! is_made_from "$archive" "$3" "$e2e"/{image.sh,image_archive.py,system-images.sh} || return 0
  new_image
  add_program "$1" "$2"
  if [[ $1 = busybox ]]; then
    for applet in $(busybox --list); do
      ln -s /usr/local/bin/busybox "$tree/bin/$applet"
    done
  fi
  save_image "$archive" "e2e.local/$1:1" "$1"
  mark_as_made "$archive"
}

lock_images
for name in pause coredns local-path-provisioner; do
  write_image "$name" "$bin/$name" "$bin/.$name.lock"
done
busybox=$(type -P busybox)
write_image busybox "$busybox" "$busybox"
