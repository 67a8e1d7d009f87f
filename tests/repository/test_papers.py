# SPDX-License-Identifier: Apache-2.0
"""Workflows run targets of the Makefile and nothing else; papers name the version that there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_choreo

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_ACTIONS = {"actions/checkout", "actions/setup-python"}


def steps_of(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_is_one_for_each_of_these() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "lint", "nightly", "tests", "wheel"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_and_nothing_else(path: Path) -> None:
    runs = [step["run"] for step in steps_of(path) if "run" in step]
    assert runs
    for run in runs:
        assert re.fullmatch(r"make [a-z-]+", run) and run.split()[1] in _TARGETS, run
    used = {step["uses"].partition("@")[0] for step in steps_of(path) if "uses" in step}
    assert used <= _ACTIONS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_alone(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "${{ github.event" not in path.read_text(), "what strangers write is never run"


def test_the_citation_names_the_version_of_the_release() -> None:
    """Between releases that of the next one."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == vllm_choreo.__version__.partition(".dev")[0]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    is_released = ".dev" not in vllm_choreo.__version__
    heading = f"## [{cited['version']}]" if is_released else "## [Unreleased]"
    assert heading in changes and ("date-released" in cited) == is_released


def test_both_ways_to_write_to_us_are_told() -> None:
    templates = ROOT / ".github"
    assert "SECURITY.md" in (templates / "ISSUE_TEMPLATE/bug.yml").read_text()
    assert "CHANGELOG.md" in (templates / "PULL_REQUEST_TEMPLATE.md").read_text()
