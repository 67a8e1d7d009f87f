#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, by apt where it may, the programs that the build and the tests run: a C++ compiler, curl
# and jq (shell examples of the documentation), Chromium (HTML pages). Fails if one is missing then.
set -euo pipefail

have() { command -v "$1" >/dev/null 2>&1; }

packages=()
have g++ || packages+=(g++)
have make || packages+=(make)
have curl || packages+=(curl)
have jq || packages+=(jq)
have chromium || have chromium-browser || have google-chrome || packages+=(chromium)
[ ${#packages[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo -n)
fi
if have apt-get && "${as_root[@]}" true 2>/dev/null; then
    echo "installing ${packages[*]}"
    "${as_root[@]}" apt-get update -qq
    # One by one: a package that is not there must not keep the others away.
    for package in "${packages[@]}"; do
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null || true
    done
fi

missing=()
for program in g++ make curl jq; do
    have "$program" || missing+=("$program")
done
have chromium || have chromium-browser || have google-chrome || missing+=(chromium)
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing, and not installed by apt (no root, no apt, or no such package): ${missing[*]}" >&2
    exit 1
fi
