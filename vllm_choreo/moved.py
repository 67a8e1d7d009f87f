# SPDX-License-Identifier: Apache-2.0
"""Old names of modules that have moved: imported with a warning, for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Packages and modules by their names in `vllm_choreo`, the inner ones first.
_MOVED = {
    "workflows.record.transcript": "transcript.transcript",
    "workflows.record.check": "transcript.check",
    "workflows.record": "lab.record",
    "workflows.problems": "lab.problems",
    "workflows": "lab.workflows",
    "train": "lab.train",
    "judge": "lab.study",
    "show.page": "transcript.page",
    "show": "lab.report",
    "smallmodel": "testing.models",
    "planner.ray_workers": "planner.workers.ray",
    "planner.server_workers": "planner.workers.server",
}


class MovedModules(MetaPathFinder, Loader):
    """Finder of moved modules. An old name is the module of the new one, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of `module`, as importlib allows."""
        old = module.__name__
        new = _new_name(old)
        assert new is not None
        warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def _new_name(fullname: str) -> str | None:
    package, _, name = fullname.partition(".")
    if package == "vllm_choreo":
        for old, new in _MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return f"{package}.{new}{name[len(old) :]}"
    return None


def install() -> None:
    """Look for moved modules before others: their packages have paths where all would be found."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
