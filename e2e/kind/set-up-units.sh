#!/usr/bin/env bash
# Set up systemd in the root file system of a node image for kind, as kind's Dockerfile does; a
# hook of mmdebstrap.
#
#   kind/set-up-units.sh ROOT
set -euo pipefail
root=$1

find "$root/lib/systemd/system/sysinit.target.wants" -name systemd-tmpfiles-setup.service -delete
rm -f "$root"/lib/systemd/system/{multi-user,local-fs,basic}.target.wants/* \
  "$root"/lib/systemd/system/sockets.target.wants/*{udev,initctl}* \
  "$root"/etc/systemd/system/*.wants/*
echo ReadKMsg=no >>"$root/etc/systemd/journald.conf"

# Debian's containerd is where kind looks for it.
for program in containerd ctr containerd-shim-runc-v2; do
  ln -sf "/usr/bin/$program" "$root/usr/local/bin/$program"
done
mkdir -p "$root"/etc/kubernetes/manifests "$root/opt/cni"
rm -rf "$root"/etc/cni/net.d/* "$root/opt/cni/bin"
ln -s /usr/lib/cni "$root/opt/cni/bin"

cat >"$root/etc/systemd/system/import-images.service" <<'UNIT'
[Unit]
After=containerd.service
Requires=containerd.service

[Service]
Type=oneshot
ExecStart=/bin/sh -euc 'for image in /kind/images/*; do ctr -n k8s.io images import "$image"; done'

[Install]
WantedBy=multi-user.target
UNIT
cat >"$root/etc/systemd/system/kubelet.service.d/20-e2e.conf" <<'UNIT'
[Unit]
After=import-images.service

[Service]
ExecStartPre=/kind/bin/keep-sysctls.sh
UNIT
chroot "$root" systemctl enable kubelet containerd undo-mount-hacks import-images
chroot "$root" systemctl mask systemd-binfmt.service
: >"$root/etc/machine-id"
