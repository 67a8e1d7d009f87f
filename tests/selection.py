# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: which tests run, and whether one may be skipped. `conftest.py` takes them over.

- `--all` runs the tests marked `exhaustive`, too.
- `--no-skips` fails what is skipped for any reason but a missing GPU.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests marked exhaustive, too")
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail tests that are skipped, but for those marked gpu where there is no GPU",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `exhaustive` tests out unless asked for; skip those marked `gpu` without a GPU."""
    if not config.getoption("all"):
        exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
        if exhaustive:
            config.hook.pytest_deselected(items=exhaustive)
            items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    needs_gpu = item.get_closest_marker("gpu") and not _has_gpu()
    # A test that is expected to fail is "skipped", too; its report says so in `wasxfail`.
    if not needs_gpu and not hasattr(report, "wasxfail"):
        _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report, collector.config)
    return report


def _fail_if_skipped(report: Any, config: pytest.Config) -> None:
    if report.skipped and config.getoption("no_skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--no-skips: {reason}"
