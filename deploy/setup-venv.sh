#!/bin/sh
# Build the virtual environment that make uses: development tools, CPU torch, this package.
# Needs Python 3.11 to 3.13 and a C compiler (posix_ipc is built from source); installs Debian's
# packages for both where they are missing and this is root.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

debian_install() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "missing: $*. Install them and run make again." >&2
        exit 1
    fi
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
}

if ! supported "$PYTHON"; then
    for candidate in python3.13 python3.12 python3.11; do
        if supported "$candidate"; then PYTHON=$candidate; break; fi
    done
fi
supported "$PYTHON" || debian_install python3 python3-venv python3-dev
supported "$PYTHON" || { echo "Python 3.11 to 3.13 is needed; set PYTHON=..." >&2; exit 1; }
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || debian_install python3-venv
command -v cc >/dev/null || debian_install gcc libc6-dev
"$PYTHON" -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' \
    || debian_install python3-dev

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet "$@"; }

# The CPU build of torch where the index offers one: a looser request brings gigabytes of CUDA.
"$VENV/bin/python" -c 'import torch' 2>/dev/null || pip "torch==2.13.0"
pip --constraint constraints.txt --editable '.[transformers,dev]'
