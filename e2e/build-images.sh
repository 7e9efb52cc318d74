#!/usr/bin/env bash
# Build the container images of the Dockerfile, with docker if its daemon answers, else with buildah,
# which root gets installed on Debian.
#
#   e2e/build-images.sh                    those of a bus
#   e2e/build-images.sh postbus-pipeline   only this one
#
# Docker keeps its images itself; buildah's are written to $E2E_CACHE/images/NAME-TAG.tar, by default
# below e2e/.cache, for `kind load image-archive` or `ctr images import`. Variables:
#
#   TAG     tag of the images, by default dev
#   BASE    base image; by default the Dockerfile's if it can be pulled, else a stand-in of Debian
#           packages, made with mmdebstrap
#
# pip uses the settings of pip here: index, proxy and certificate are passed to it as secrets.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
top=$(dirname "$e2e")
tag=${TAG:-dev}
[[ $# != 0 ]] || set -- postbus postbus-store

has() { command -v "$1" >/dev/null; }

# --- builders -----------------------------------------------------------------------------------

# Its own storage: images of other projects are neither seen nor removed.
buildah_here() {
  buildah --root "$E2E_CACHE/buildah" --runroot "$work/run" --storage-driver overlay "$@"
}

has_image() {
  if [[ $builder == docker ]]; then docker image inspect "$1"; else buildah_here inspect "$1"; fi
} >/dev/null 2>&1

pull() {
  if [[ $builder == docker ]]; then docker pull -q "$1"; else buildah_here pull -q "$1"; fi
} >/dev/null 2>&1

build() { # <target>
  local name=$1 image=$1:$tag archive=$images/$1-$tag.tar
  local options=(
    --file "$top/Dockerfile" --target "$name" --tag "$image" --build-arg "BASE=$base"
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision"
    --secret "id=pip.conf,src=$work/pip.conf" --secret "id=ca.crt,src=$work/ca.crt"
  )
  for variable in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [[ -z ${!variable:-} ]] || options+=(--build-arg "$variable=${!variable}")
  done
  echo "building $image" >&2
  if [[ $builder == docker ]]; then
    DOCKER_BUILDKIT=1 docker build --quiet "${options[@]}" "$top" >/dev/null
    echo "$image"
    return
  fi
  # In a chroot: needs neither a daemon nor the right to raise limits, which containers often lack.
  buildah_here build --isolation chroot --network host --layers --pull-never --quiet \
    "${options[@]}" "$top" >/dev/null
  write_archive "$image" "$archive"
  echo "$archive"
}

# Write an archive unless it has this very image.
write_archive() { # <image> <archive>
  local id
  id=$(buildah_here images --quiet --no-trunc "$1")
  [[ ! -s $2 || $(cat "$2.id" 2>/dev/null) != "$id" ]] || return 0
  rm -f "$2.id" "$2.part"
  # By its id: the archive then has this name only, without buildah's own for what is local.
  buildah_here push --quiet "$id" "docker-archive:$2.part:$1"
  mv "$2.part" "$2"
  echo "$id" >"$2.id"
}

# --- base ---------------------------------------------------------------------------------------

# What goes into the stand-in.
recipe=(
  --variant=minbase --format=tar --include=ca-certificates,python3,usr-is-merged
  # Without it the package usrmerge would be installed, and perl with it.
  --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright'
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/man/*'
  # The machine's own, and not for the image.
  --customize-hook='rm -f "$1/etc/resolv.conf" "$1/etc/hostname"'
  bookworm
)

# Print the image to build on. What is there already needs no network.
choose_base() {
  local wanted key stand_in
  wanted=$(sed -n 's/^ARG BASE=//p' "$top/Dockerfile")
  key=$(printf '%s\n' "$(uname -m)" "${recipe[@]}" | sha256sum | cut -c1-12)
  stand_in=localhost/postbus-base:$key
  if [[ -n ${BASE:-} ]]; then
    has_image "$BASE" || pull "$BASE" || fail "the base image $BASE cannot be pulled"
    echo "$BASE"
  elif has_image "$wanted"; then
    echo "$wanted"
  elif has_image "$stand_in"; then
    echo "$stand_in"
  elif pull "$wanted"; then
    echo "$wanted"
  else
    make_stand_in "$stand_in" "$images/base-$key.tar"
    echo "$stand_in"
  fi
}

make_stand_in() { # <image> <archive of its files>
  local container
  if [[ ! -s $2 ]]; then
    has mmdebstrap || "$e2e/install.sh" images ||
      fail "the base image cannot be pulled: set BASE, or install mmdebstrap" 77
    echo "making a base of Debian's packages" >&2
    mmdebstrap "${recipe[@]}" "$2.part" 2>"$work/mmdebstrap.log" || {
      tail "$work/mmdebstrap.log" >&2
      fail "mmdebstrap could not make a base"
    }
    mv "$2.part" "$2"
  fi
  if [[ $builder == docker ]]; then
    docker import "$2" "$1" >/dev/null
  else
    container=$(buildah_here from scratch)
    buildah_here add --quiet "$container" "$2" / >/dev/null
    buildah_here commit --quiet --rm "$container" "$1" >/dev/null
  fi
}

# --- all ----------------------------------------------------------------------------------------

if has docker && docker info >/dev/null 2>&1; then
  builder=docker
elif [[ $(id -u) != 0 ]]; then
  fail "no docker daemon answers: start one, or be root, which buildah needs" 77
else
  has buildah || "$e2e/install.sh" images || fail "no docker daemon answers, nor is there buildah" 77
  builder=buildah
fi
mkdir -p "$images"
exec 9>"$images/lock"
flock 9
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$top/pyproject.toml")
revision=$(git -C "$top" rev-parse HEAD 2>/dev/null || echo unknown)
python3 "$e2e/pip_settings.py" "$work"
base=$(choose_base)
for name in "$@"; do
  build "$name"
done
