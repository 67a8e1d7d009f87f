# SPDX-License-Identifier: Apache-2.0
"""An engine core ends with the process that started it, and no other process does."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
from typing import Any

import pytest

from vllm_choreo.engine.orphan import end_with_parent

# What a child writes to when it is there; readable and empty when all have ended.
_SECONDS = 60.0


def _child(told: Any) -> None:
    end_with_parent()
    told.send(os.getpid())
    while True:
        signal.pause()


def _start(name: str, told: Any) -> None:
    """Start a child of that name, and wait to be killed."""
    multiprocessing.get_context("spawn").Process(target=_child, args=(told,), name=name).start()
    told.close()
    while True:
        signal.pause()


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does")
@pytest.mark.parametrize(("name", "ends"), [("EngineCore", True), ("SomethingElse", False)])
def test_a_process_whose_parent_is_killed(name: str, ends: bool) -> None:
    context = multiprocessing.get_context("spawn")
    hears, told = context.Pipe(duplex=False)
    parent = context.Process(target=_start, args=(name, told))
    parent.start()
    told.close()
    child = hears.recv()
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join(_SECONDS)
    try:
        if ends:
            assert select.select([hears], [], [], _SECONDS)[0], "it lives on"
            with pytest.raises(EOFError):
                hears.recv()
        else:
            time.sleep(1)
            os.kill(child, 0)  # raises ProcessLookupError if it has ended
    finally:
        if not ends:
            os.kill(child, signal.SIGKILL)


def test_in_a_process_that_nobody_spawned_nothing_is_watched() -> None:
    import threading

    end_with_parent()
    assert not any(thread.name == "choreo-parent" for thread in threading.enumerate())
