#!/bin/sh
# Build the virtual environment of `make conformance`: vLLM's released package as pure Python,
# CPU torch, what vLLM imports, and this package. Cached in .venv-vllm; quick when it is there.
# One that was interrupted is completed by the next run.
#
# vLLM is built from its source release without compiled operators (VLLM_TARGET_DEVICE=empty): its
# wheel wants CUDA builds of torch and gigabytes of kernels that a CPU cannot run. Everything that
# conformance runs is vLLM's Python, byte for byte what the wheel holds.
set -eu

PYTHON=${PYTHON:-python3}
VENV=${VLLM_VENV:-.venv-vllm}
VLLM_VERSION=${VLLM_VERSION:-0.33.0}
TORCH_VERSION=2.13.0
NEEDED_MIB=3000
STAMP=$VENV/.set-up-$VLLM_VERSION-$TORCH_VERSION
HERE=$(dirname "$0")

fail() {
    echo "conformance environment: $1" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

is_fresh() {
    [ -e "$STAMP" ] || return 1
    for input in "$0" "$HERE/vllm-requirements.txt" "$HERE/vllm-constraints.txt" pyproject.toml; do
        [ "$input" -nt "$STAMP" ] && return 1
    done
    return 0
}

# Packages go last: pip's own words stand above ours when it fails.
install() {
    what=$1
    shift
    echo "conformance environment: $what"
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@" || fail \
        "$what: pip failed, see above. Its index must have these packages (PIP_INDEX_URL)"
}

is_fresh && exit 0

if ! supported "$PYTHON"; then
    for candidate in python3.13 python3.12 python3.11; do
        if supported "$candidate"; then PYTHON=$candidate; break; fi
    done
fi
supported "$PYTHON" || fail "Python 3.11 to 3.13 is needed; set PYTHON=..."
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || fail "$PYTHON has no venv (python3-venv)"
command -v cc >/dev/null || fail "a C compiler is needed: posix_ipc is built from source"
free_mib=$(df -Pm . | awk 'NR == 2 { print $4 }')
[ -x "$VENV/bin/python" ] || [ "$free_mib" -ge "$NEEDED_MIB" ] || fail \
    "$free_mib MiB are free here, $NEEDED_MIB are needed"

# Broken where its Python went away; a directory without pip was interrupted.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
constraints="--constraint $HERE/vllm-constraints.txt"
# The CPU build of torch where the index offers one: a looser request brings gigabytes of CUDA.
# shellcheck disable=SC2086  # two words on purpose
install "torch $TORCH_VERSION" $constraints "torch==$TORCH_VERSION"
# shellcheck disable=SC2086
install "what vLLM imports" $constraints -r "$HERE/vllm-requirements.txt" "torch==$TORCH_VERSION"
# These two ask for more than an import needs (torch extras, CUDA); their own code is enough.
install "xgrammar" --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.11
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$VLLM_VERSION
export VLLM_TARGET_DEVICE VLLM_VERSION_OVERRIDE
install "vllm $VLLM_VERSION, its source release" \
    --no-deps --no-build-isolation --no-binary vllm "vllm==$VLLM_VERSION"
# shellcheck disable=SC2086
install "this package" $constraints --no-build-isolation --editable .

VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 "$VENV/bin/python" -c '
import sys, vllm, vllm.v1.hisparse.binding
sys.exit(vllm.__version__.split("+")[0] != sys.argv[1])' "$VLLM_VERSION" || fail \
    "vLLM $VLLM_VERSION cannot be imported; remove $VENV and try again"
touch "$STAMP"
