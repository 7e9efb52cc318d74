#!/usr/bin/env bash
# Run the end-to-end tests on a new cluster of E2E_CLUSTER: start it, build the images and load them,
# run the tests, end it, and write the duration of each step.
#
#   e2e/test.sh .venv/bin/python -m pytest e2e/tests
#
# The first test installs the charts. TAG names the tag of the images, by default dev. On an existing
# cluster without E2E_LOAD the images must be there. E2E_IMAGES names those of this folder that are
# built and loaded, by default those of a bus. E2E_TREES names more folders of source, each as
# TAG=FOLDER, with the images of a bus.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
help_for "$0" "$@"
export TAG=${TAG:-dev}
export E2E_IMAGE_TAG=$TAG
steps=()

step() { # <name> <command>...
  local name=$1 start=$SECONDS status=0
  shift
  "$@" || status=$?
  steps+=("$(printf '%4d s  %s' $((SECONDS - start)) "$name")")
  return "$status"
}

load_images() {
  local each archive
  while read -r each; do
    archive=$each
    if [[ $each != *.tar ]]; then  # docker has it
      archive=$scratch/image.tar
      docker save --output "$archive" "$each"
    fi
    "$e2e/load-image.sh" "$archive"
  done <"$scratch/built"
}

build_images() {
  local each
  # shellcheck disable=SC2086  # names
  "$e2e/build-images.sh" ${E2E_IMAGES:-} || return
  for each in ${E2E_TREES:-}; do
    TAG=${each%%=*} "${each#*=}/e2e/build-images.sh" || return
  done
} >"$scratch/built"

at_exit() {
  local status=$?
  trap - EXIT
  step "cluster ended" "$e2e/down.sh" || true
  rm -rf "$scratch"
  printf '%s\n' "${steps[@]}"
  exit "$status"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
step "cluster started" "$e2e/up.sh"
trap at_exit EXIT
if [[ $E2E_CLUSTER != existing || -n ${E2E_LOAD:-} ]]; then
  step "images built" build_images
  step "images loaded" load_images
fi
step "tests run" "$e2e/run.sh" "$@"
