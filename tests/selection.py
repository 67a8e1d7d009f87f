# SPDX-License-Identifier: Apache-2.0
"""Hooks of pytest: which tests run, and whether one may be skipped. `conftest.py` takes them over.

- `--all` runs the tests marked `exhaustive`, too, and draws more random inputs; `--nightly` runs
  those marked `nightly` as well.
- `--no-skips` fails what is skipped for any reason but a missing GPU.
- Folders whose files take long come first, so that processes which share the files end together.
- Files whose tests ask for the same server, or the same engine, run in one process, one after
  another: a server takes 50 s of CPU to start, an engine 5. A file is never divided, unless its
  tests share nothing.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import (
    fault_handler_stderr_fd_key,
    get_exit_on_timeout_config_value,
    get_timeout_config_value,
)

_FOLDERS = (
    *("server", "engine", "planner", "pml", "prototypes", "study", "workflows", "benchmarks"),
    *("ops", "train"),
)
_TURN = {name: turn for turn, name in enumerate(_FOLDERS)}
# True while a test is torn down if the next one is of the same file, or shares its engine.
SHARES_NEXT = pytest.StashKey[bool]()
# So long after its time a test that no signal reaches ends its process.
_GRACE_SECONDS = 60.0
# Hundreds of choreographies each with `--all`, or a kernel's rows one by one in Triton's
# interpreter, and a file is run by one process.
_LONGEST = (
    "test_feature_machine.py",
    "test_gpu_path.py",
    "test_random.py",
    "test_repair.py",
    "test_runner_v2.py",
)
# Each test of these starts a process of its own, so nothing is shared by running them in one.
_APART = ("test_gpu_path.py", "test_runner_v2.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run tests marked exhaustive, too")
    parser.addoption(
        "--nightly", action="store_true", help="run tests marked exhaustive or nightly, too"
    )
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail tests that are skipped, but for those marked gpu where there is no GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """So many inputs of each law of which hypothesis draws them, where a test names no number.

    The ordinary pass draws the same every time, so that nobody's change fails by what it has not
    touched; the exhaustive one looks for new ones. How long they take says nothing: other processes
    share the cores.
    """
    from hypothesis import HealthCheck, settings

    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("some", untimed, max_examples=40, derandomize=True)
    settings.register_profile("all", untimed, max_examples=80)
    settings.load_profile("some" if "exhaustive" in _left_out(config) else "all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order tests; skip those marked `gpu` without a GPU."""
    names = _left_out(config)
    left_out = [item for item in items if any(map(item.get_closest_marker, names))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not any(map(item.get_closest_marker, names))]
    items.sort(key=_turn)
    first: dict[str, int] = {}
    for index, item in enumerate(items):
        first.setdefault(_home(item.path), index)
    items.sort(key=lambda item: first[_home(item.path)])
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _left_out(config: pytest.Config) -> tuple[str, ...]:
    """Marks of the tests that are not asked for."""
    if config.getoption("nightly"):
        return ()
    return ("nightly",) if config.getoption("all") else ("exhaustive", "nightly")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests stay together in a process: those of a file, of a server, of an engine."""
    from xdist.scheduler import LoadFileScheduling

    class LoadHomeScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / super()._split_scope(nodeid)
            return nodeid if path.name in _APART else _home(path)

    return LoadHomeScheduling(config, log)


@cache
def _home(path: Path) -> str:
    """The server or engine that the tests of a file share with others, or the file itself."""
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    if "plain_llama" in text:
        return "plain_llama"
    if path.parent.name == "server":
        if "whole_server" in text:
            return "whole_server"
        if "start_server" not in text:
            return "server"
    return str(path)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    return item.path.name not in _LONGEST, _TURN.get(item.path.parent.name, len(_TURN))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test that may take longer than others its time, until its process is ended.

    pytest ends all processes after the same time (`faulthandler_timeout`), whatever a test's mark
    `timeout` allows it.
    """
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0]) + _GRACE_SECONDS if mark and mark.args else 0.0
    if 0 < get_timeout_config_value(item.config) < seconds:
        file = item.config.stash[fault_handler_stderr_fd_key]
        is_ended = get_exit_on_timeout_config_value(item.config)
        faulthandler.dump_traceback_later(seconds, file=file, exit=is_ended)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tell fixtures whether what they made is wanted by the next test, too."""
    is_next = nextitem is not None and _home(nextitem.path) == _home(item.path)
    item.config.stash[SHARES_NEXT] = is_next


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
    _fail_if_fixtures_are_unknown(report)
    return report


def _fail_if_skipped(report: Any, config: pytest.Config) -> None:
    if report.skipped and config.getoption("no_skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--no-skips: {reason}"


def _fail_if_fixtures_are_unknown(report: pytest.CollectReport) -> None:
    """Fail a module whose tests ask for what its folder has not, though they are not run now."""
    for item in report.result or ():
        if isinstance(item, pytest.Function):
            asked = item._fixtureinfo  # behind `item.fixturenames`, with who provides each
            unknown = set(asked.names_closure) - set(asked.name2fixturedefs) - {"request"}
            if unknown:
                report.outcome = "failed"
                report.longrepr = f"{item.nodeid} asks for unknown fixtures: {unknown}"
