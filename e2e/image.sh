# Making of small images: of one program each, without a builder.
# shellcheck shell=bash

# Wait until no other script makes images for the cluster here.
lock_images() {
  mkdir -p "$images"
  exec 9>"$images/.system.lock"
  flock 9
}

# Whether an archive was made from these inputs; if not, `mark_as_made` notes them.
is_made_from() { # <archive> <input>...
  inputs=$(cat "${@:2}" | sha256sum)
  [[ -s $1 && $inputs = "$(cat "$1.inputs" 2>/dev/null)" ]]
}

mark_as_made() { # <archive>
  echo "$inputs" >"$1.inputs"
}

new_image() {
  tree=$(mktemp -d)
  mkdir -p "$tree/bin" "$tree/tmp"
  chmod 1777 "$tree/tmp"
}

add_program() { # <name> <file>
  install -D --mode 0755 "$2" "$tree/usr/local/bin/$1"
}

save_image() { # <archive> <name:tag> <program>
  python3 "$e2e/image_archive.py" "$1" "$2" "$tree" "/usr/local/bin/$3"
  rm -r "$tree"
}

# Add iptables of this machine, which kube-proxy calls, with the libraries that it loads.
add_iptables() {
  local program=/usr/sbin/xtables-nft-multi file
  for file in $(ldd "$program" /usr/lib/*/xtables/*.so | grep -oE '(/usr)?/lib[^ :]*' | sort -u); do
    install -D "$file" "$tree$file"
  done
  install -D "$program" "$tree$program"
  for file in {ip,ip6}tables{,-save,-restore}; do
    ln -s "${program##*/}" "$tree/usr/sbin/$file"
  done
}
