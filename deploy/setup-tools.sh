#!/bin/sh
# Unpack the Debian packages that `make deploy-test` needs into .tools, without installing them: no
# service is started and no root is needed, only apt's package lists. Installed tools are used as
# they are.
set -eu

TOOLS=${TOOLS:-$PWD/.tools}

has() { command -v "$1" >/dev/null 2>&1 || [ -x "$TOOLS/usr/bin/$1" ]; }

fetch() {
    command -v apt-get >/dev/null || { echo "install $* and run again" >&2; exit 1; }
    work=$(mktemp -d)
    chmod 755 "$work"
    (cd "$work" && { apt-get download -qq "$@" 2>/dev/null || {
        apt-get update -qq && apt-get download -qq "$@"; }; })
    mkdir -p "$TOOLS"
    for package in "$work"/*.deb; do dpkg -x "$package" "$TOOLS"; done
    rm -rf "$work"
}

has promtool && has prometheus || fetch prometheus
has strace || fetch strace
has systemd-analyze || echo "systemd-analyze is missing: the unit's tests will be skipped" >&2
has kubectl || echo "kubectl is missing: the manifests' tests will be skipped" >&2
