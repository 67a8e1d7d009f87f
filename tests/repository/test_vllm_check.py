# SPDX-License-Identifier: Apache-2.0
"""What we use of vLLM is there: in the installed version, and the check sees what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tools.vllm_check.__main__ import check_sources, installed, summary
from tools.vllm_check.fetch import latest, newest
from tools.vllm_check.source_tree import SourceTree
from tools.vllm_check.uses import Uses
from vllm_choreo.engine.compat import SUPPORTED_VLLM


@pytest.mark.exhaustive  # `make check-vllm` does the same
def test_the_installed_vllm_has_all_that_is_used() -> None:
    version, folder = installed()
    assert version in SUPPORTED_VLLM
    found, counts = check_sources(folder)
    assert not found
    # Below these the check would have lost sight of something.
    assert counts["names"] > 60 and counts["overrides"] > 40
    assert counts["calls"] > 90 and counts["attributes"] > 500


def test_the_newest_release_is_chosen_among_what_the_index_has() -> None:
    found = [Version(text) for text in ("0.9.2", "0.33.0", "0.34.0rc1", "0.4.0", "0.33.0.dev7")]
    assert newest(found) == "0.33.0"
    with pytest.raises(SystemExit, match="no release"):
        newest([Version("0.34.0rc1")])


def test_latest_asks_the_index_that_pip_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in place of an index: sources and wheels of some versions, all empty."""
    for name in ("vllm-0.98.0.tar.gz", "vllm-0.99.1.tar.gz", "vllm-0.99.2rc1.tar.gz"):
        (tmp_path / name).touch()
    (tmp_path / "vllm-1.0.0-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert latest() == "0.99.1"


def test_the_summary_says_what_breaks() -> None:
    known, unknown = SUPPORTED_VLLM[0], "99.0.0"
    assert summary(known, 0, 0) == f"vLLM {known} (supported): all that was looked at fits"
    assert summary(unknown, 3, 2) == (
        f"vLLM {unknown} (not listed as supported): BREAKS: 3 uses of it do not fit, "
        "2 of its tests are lost"
    )


# A package as it was used, and what becomes of it.
_THEIRS = """
class Base:
    def __init__(self, size, *, name="x"):
        self.size = size

    def lookup(self, key):
        return self.find(key)

    def find(self, key, limit=None):
        return key

class Manager(Base):
    @property
    def usage(self):
        return 0

def make(kind, count=1):
    return kind

class Engine:
    def start(self, block):
        return Manager(3).lookup(block)
"""
_OURS = """
from vllm.v1.core import Manager, make

class OurManager(Manager):
    def lookup(self, key):
        return super().lookup(key), self.size, self.usage, self.find(key, limit=3)

def use(manager: Manager | None):
    make("a", count=2)
    Manager(4, name="b")
    return manager.find(1), manager.size

PATH = "vllm.v1.core.Engine"
"""
_DECLARED = ("vllm.v1.core.Engine.start(block)", "vllm.v1.core.Base.size")


def _findings(folder: Path, theirs: str) -> list[str]:
    for name, text in {"vllm/v1/core.py": theirs, "vllm_choreo/a.py": _OURS}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.with_name("__init__.py").touch()
    (folder / "vllm" / "__init__.py").touch()
    tree = SourceTree({name: folder / name for name in ("vllm", "vllm_choreo")})
    return [str(finding) for finding in Uses(tree).findings(_DECLARED)]


def test_what_is_as_it_was_is_not_reported(tmp_path: Path) -> None:
    assert _findings(tmp_path, _THEIRS) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("def make(", "def produce(", "a.py:2: there is no vllm.v1.core.make"),
        ("class Engine", "class Core", "a.py:13: there is no vllm.v1.core.Engine"),
        ("make(kind, count=1)", "make(kind)", "a.py:9: make has no parameter 'count'"),
        ("make(kind, count=1)", "make(kind, count, more)", "a.py:9: make needs more"),
        ('name="x"', 'title="x"', "a.py:10: Manager has no parameter 'name'"),
        ("key, limit=None", "key", "a.py:6: vllm.v1.core.Base.find has no parameter 'limit'"),
        ("def find", "def search", "a.py:6: vllm_choreo.a.OurManager has no find"),
        ("self.size =", "self.length =", "a.py:11: vllm.v1.core.Manager has no size"),
        ("self.size =", "self.length =", "declared.py: there is no vllm.v1.core.Base.size"),
        ("def start(self, block)", "def start(self)", "Engine.start takes 0 arguments by position"),
        ("def lookup", "def get", "nothing to override has lookup"),
        ("lookup(self, key)", "lookup(self, key, bound=None)", "has the parameter 'bound' there"),
        ("lookup(self, key)", "lookup(self, item)", "parameter 1 is 'item' there and 'key' here"),
        ("lookup(self, key)", "lookup(self, key, *more)", "takes any arguments by position there"),
        ("lookup(self, key)", "lookup(self)", "a.py:5: vllm.v1.core.Base.lookup is called without"),
        (
            "    def lookup",
            "    @property\n    def lookup",
            "is a property there",
        ),
    ],
)
def test_what_changed_is_found(tmp_path: Path, before: str, after: str, expected: str) -> None:
    assert before in _THEIRS
    found = _findings(tmp_path, _THEIRS.replace(before, after))
    assert any(expected in finding for finding in found), found
