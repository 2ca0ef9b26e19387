#!/bin/sh
# Build the virtual environment of `make conformance`: vLLM's released package as pure Python,
# CPU torch, what vLLM imports, and this package. Cached in .venv-vllm; quick when it is there.
#
# vLLM is built from its source release without compiled operators (VLLM_TARGET_DEVICE=empty): its
# wheel wants CUDA builds of torch and gigabytes of kernels that a CPU cannot run. Everything that
# conformance runs is vLLM's Python, byte for byte what the wheel holds.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VLLM_VENV:-.venv-vllm}
VLLM_VERSION=${VLLM_VERSION:-0.33.0}
TORCH_VERSION=2.13.0
STAMP=$VENV/.set-up-$VLLM_VERSION-$TORCH_VERSION

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

if ! supported "$PYTHON"; then
    for candidate in python3.13 python3.12 python3.11; do
        if supported "$candidate"; then PYTHON=$candidate; break; fi
    done
fi
supported "$PYTHON" || { echo "Python 3.11 to 3.13 is needed; set PYTHON=..." >&2; exit 1; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

# Read one name and version a line, without comments, as arguments.
requirements() { sed 's/#.*//' "$1" | tr -s '[:space:]' ' '; }

HERE=$(dirname "$0")
if [ ! -e "$STAMP" ] || [ "$HERE/vllm-requirements.txt" -nt "$STAMP" ]; then
    [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -c 'import torch' 2>/dev/null || pip "torch==$TORCH_VERSION"
    pip -r "$HERE/vllm-requirements.txt" "torch==$TORCH_VERSION"
    # These two ask for more than an import needs (torch extras, CUDA); their own code is enough.
    pip --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.11
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM_VERSION \
        pip --no-deps --no-build-isolation --no-binary vllm "vllm==$VLLM_VERSION"
    touch "$STAMP"
fi
pip --editable .
