# SPDX-License-Identifier: Apache-2.0
"""Answers that are programs in Python: found in what a model says, and run against a test.

A program of a model may do anything. It is run only where `HF_ALLOW_CODE_EVAL=1`, the consent that
HuggingFace's `code_eval` and lm-eval ask for, too; in a process of its own, in an empty folder that
is deleted, without this process's environment, and with bounds of time, memory and file size. That
keeps accidents away, not attacks: run models that you do not trust in a container.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings

from vllm_choreo.errors import ChoreoError

CONSENT = "HF_ALLOW_CODE_EVAL"

_SECONDS = 10  # of the processor; and three times as many on the clock, for busy machines
_BYTES, _FILE_BYTES = 2**30, 2**20
# What a program that ran to its end returns: one that leaves early does not know it.
_PASSED = 93
_BOUNDS = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({_FILE_BYTES}, {_FILE_BYTES}))
del resource
"""
_FENCE = re.compile(r"^[ \t]*```.*$", re.MULTILINE)
# It has to be a program's first statement, wherever the answer has it.
_FUTURE = re.compile(r"^from __future__ import [\w, ]+$", re.MULTILINE)
_STATEMENT = re.compile(r"^(?:def|async def|class|import|from|@)\b", re.MULTILINE)


def check_code_may_run() -> None:
    """Raise unless the environment says that programs of models may be run.

    Raises:
        ChoreoError: it does not.
    """
    if os.environ.get(CONSENT) != "1":
        raise ChoreoError(
            "answers are programs that a model writes, and judging them runs them, in a process "
            f"with bounds but no more than that: set {CONSENT}=1 to allow it, in a container if "
            "you do not trust the model",
            parameter=CONSENT,
            value=os.environ.get(CONSENT),
        )


def program_in(text: str) -> str:
    """The program in what a model says: in the first block of code that has a definition.

    What stands before the first fence is a block, too, for an answer may begin inside one. Without
    any definition it is that: the body of a function, or prose.
    """
    parts = _FENCE.split(text)
    return next((part for part in parts if _STATEMENT.search(part)), parts[0])


@functools.lru_cache(maxsize=4096)
def passes(text: str, head: str, test: str) -> bool:
    """Tell if the program in a model's answer passes a test; both are run.

    Args:
        text: the answer.
        head: program before it, in which functions may be that the answer does not repeat. A head
            that ends with the first lines of a function may be completed by its body.
        test: program behind it, which raises an exception if anything is wrong.

    Raises:
        ChoreoError: no consent; see `check_code_may_run`.
    """
    check_code_may_run()
    found = program_in(text)
    first = "\n".join(_FUTURE.findall(found))
    found = _FUTURE.sub("", found)
    joint = "\n" if _is_program(found) else ""
    end = f"import sys\nsys.exit({_PASSED})"
    program = f"{first}\n{_BOUNDS}\n{head}{joint}{found}\n\n{test}\n\n{end}\n"
    return _is_program(program) and _exit_status(program) == _PASSED


def _is_program(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes, say, in what a model wrote
            compile(text, "answer", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _exit_status(program: str) -> int | None:
    """Run a program; None if it took too long."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=3 * _SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_group(process.pid)  # what it may have started, too
            process.wait()
        return process.returncode


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
