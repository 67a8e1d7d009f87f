# SPDX-License-Identifier: Apache-2.0
"""Child processes that are asked by a line of JSON and answer with one.

    python -m benchmarks.harness.child MODULE [ARGUMENT ...]

runs `MODULE.child(*arguments)`, which starts what it needs and calls `serve`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import BENCHMARKS

_MARK = '{"answer":'  # whatever else a child prints begins otherwise


class Child:
    """A Python program that runs `serve`. Whoever is not asked sleeps.

    Args:
        name: for errors.
        arguments: of `python`.
        environment: changes to this process's.
        folder: to run it in; the one that holds `benchmarks` by default.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            cwd=folder or BENCHMARKS.parent,
        )

    @classmethod
    def of(cls, module: str, *arguments: str, **environment: str) -> Child:
        """The child of a module."""
        return cls(module, ["-m", __name__, module, *arguments], environment)

    def ask(self, question: Any) -> Any:
        """The answer to a question; both are what JSON can carry.

        Raises SystemExit: the child ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line)["answer"]
        raise SystemExit(f"{self.name} ended with status {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(answer: Callable[[Any], Any]) -> None:
    """In the child: answer questions until there are no more."""
    for line in sys.stdin:
        print(json.dumps({"answer": answer(json.loads(line))}), flush=True)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1]).child(*sys.argv[2:])
