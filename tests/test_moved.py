# SPDX-License-Identifier: Apache-2.0
"""Names of modules that have moved: imported for one release, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

from vllm_choreo.moved import _MOVED, install

# As README and docs showed them, and packages whose contents are now in two places.
NAMES = {
    "smallmodel.embedded": "testing.models.embedded",
    "workflows.chat": "lab.workflows.chat",
    "workflows.problems.long_documents": "lab.problems.long_documents",
    "workflows.record.transcript": "transcript.transcript",
    "workflows.record.recording": "lab.record.recording",
    "train.forward": "lab.train.forward",
    "train.packing": "lab.train.packing",
    "show.page": "transcript.page",
    "judge.stats": "lab.study.stats",
}


@pytest.fixture(autouse=True)
def _not_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = {f"vllm_choreo.{name.partition('.')[0]}" for name in NAMES}
    for name in list(sys.modules):
        if ".".join(name.split(".")[:2]) in prefixes:
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old, new", NAMES.items())
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is vllm_choreo.{new} now") as warned:
        module = importlib.import_module(f"vllm_choreo.{old}")
    assert module is importlib.import_module(f"vllm_choreo.{new}")
    assert module.__name__ == module.__spec__.name == f"vllm_choreo.{new}"
    assert len(warned) == 1 + old.count(".")  # the packages above it moved, too


def test_the_warning_is_at_the_import() -> None:
    with pytest.warns(DeprecationWarning) as warned:
        from vllm_choreo.workflows.chat import user  # type: ignore[import-not-found]

    assert user("?")
    assert {warning.filename for warning in warned} == {__file__}


def test_new_names_and_other_modules_are_not_looked_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for new in NAMES.values():
            importlib.import_module(f"vllm_choreo.{new}")
    with pytest.raises(ModuleNotFoundError, match=r"vllm_choreo\.nothing"):
        importlib.import_module("vllm_choreo.nothing")
    with pytest.raises(ModuleNotFoundError, match=r"lab\.workflows\.nothing"):
        importlib.import_module("vllm_choreo.workflows.nothing")


def test_inner_names_come_first() -> None:
    names = list(_MOVED)
    for i, name in enumerate(names):
        assert not any(other.startswith(f"{name}.") for other in names[i + 1 :]), name


def test_it_is_installed_once() -> None:
    finders = [*sys.meta_path]
    install()
    assert sys.meta_path == finders
