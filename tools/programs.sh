#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, by apt where it may, the programs that the build and the tests run: a C++ compiler, curl
# and jq (shell examples of the documentation), Chromium and axe-core (HTML pages, which npm fetches).
# Fails if one is missing then.
set -euo pipefail
cd "$(dirname "$0")/.."
AXE_VERSION=4.14.1

have() { command -v "$1" >/dev/null 2>&1; }

packages=()
have g++ || packages+=(g++)
have make || packages+=(make)
have curl || packages+=(curl)
have jq || packages+=(jq)
have chromium || have chromium-browser || have google-chrome || packages+=(chromium)
# What a page is like for who does not see it; fetched for tests alone, and not committed.
axe=.browser/node_modules/axe-core/axe.min.js
[ -f "$axe" ] || have npm || packages+=(npm)
[ ${#packages[@]} -gt 0 ] || [ ! -f "$axe" ] || exit 0

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo -n)
fi
if [ ${#packages[@]} -gt 0 ] && have apt-get && "${as_root[@]}" true 2>/dev/null; then
    echo "installing ${packages[*]}"
    "${as_root[@]}" apt-get update -qq
    # One by one: a package that is not there must not keep the others away.
    for package in "${packages[@]}"; do
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "$package" >/dev/null || true
    done
fi

if [ ! -f "$axe" ] && have npm; then
    mkdir -p .browser
    npm install --silent --no-save --no-fund --no-audit --prefix .browser "axe-core@$AXE_VERSION" || true
fi

missing=()
for program in g++ make curl jq; do
    have "$program" || missing+=("$program")
done
have chromium || have chromium-browser || have google-chrome || missing+=(chromium)
[ -f "$axe" ] || missing+=("axe-core (by npm)")
if [ ${#missing[@]} -gt 0 ]; then
    echo "missing, and not installed (no root, no apt, no npm, or no such package): ${missing[*]}" >&2
    exit 1
fi
