# SPDX-License-Identifier: Apache-2.0
"""Saved messages whose files nobody vouches for: who loads them reads them, and nobody else."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.oracle import random_tokens
from tests.engine.test_keep import Saved, llm, params, said_by, saved
from vllm_choreo import Choreography
from vllm_choreo.errors import KeptError
from vllm_choreo.snapshot.manifest import manifest_bytes, read_manifest
from vllm_choreo.snapshot.storage import SnapshotFolder

__all__ = ["llm", "saved"]  # the fixtures


@pytest.fixture
def forged(llm: Any, tmp_path: Path) -> Path:
    """Two messages, under a manifest that has the keys and values of each for those of the other's;
    all plain digests are right.
    """
    folder, rng = tmp_path / "forged", random.Random(4)
    with Choreography(llm) as c:
        c.prefill(random_tokens(rng, 64), save_as="one")
        c.prefill(random_tokens(rng, 64), save_as="two")
        c.save(None, folder, encodings=True)
    kept = read_manifest(SnapshotFolder(folder))
    one, two = kept["encodings"]
    one["data"], two["data"] = two["data"], one["data"]
    (folder / "manifest.json").write_bytes(manifest_bytes(kept))
    return folder


def test_forged_keys_are_read_by_who_loads_them_alone(llm: Any, forged: Path) -> None:
    with Choreography(llm) as honest:
        texts = {m.id: m.token_ids for m in _loaded(llm, forged)}
        for name, tokens in zip(("one", "two"), texts.values(), strict=True):
            honest.prefill(tokens, save_as=name)
        right = [said_by(honest, name) for name in ("one", "two")]
        assert not any(answer.usage.untrusted for answer in right)
    with Choreography(llm) as c:
        messages = c.load(forged)
        assert all(m.usage.untrusted and not m.usage.exact for m in messages)
        assert all(m["is_untrusted"] for m in c.stats()["messages"])
        wrong = [said_by(c, name) for name in ("one", "two")]
        for answer, truth in zip(wrong, right, strict=True):
            assert answer.generated_token_ids != truth.generated_token_ids, "they are forged"
            assert answer.usage.untrusted and not answer.usage.exact
            assert truth.usage.exact
        # Whoever sends the same texts: here, in another session, and behind a message read here.
        child = c.prefill([9] * 40, parents=["one"], save_as="child")
        assert child.usage.untrusted and not child.usage.exact
        for other in (c, Choreography(llm)):
            again = other.prefill(messages[0].token_ids)
            assert again.usage.reused_tokens == 0 and not again.usage.untrusted
            behind = other.prefill([9] * 40, parents=[again])
            assert behind.usage.reused_tokens == again.num_tokens, "its parent, and no more"
            assert said_by(other, again).generated_token_ids == right[0].generated_token_ids
            other.free(again, behind)
        other.close()
        # The text alone is as good as anybody's.
        exact = said_by(c, "one", mode="exact")
        assert exact.usage.exact and not exact.usage.untrusted
        assert exact.generated_token_ids == right[0].generated_token_ids
        clean = c.reencode("two")
        assert not clean.usage.untrusted
        assert said_by(c, clean).generated_token_ids == right[1].generated_token_ids
        # Evicted and encoded again it has its own keys and values; nobody can know that it has.
        c.evict("one")
        assert said_by(c, "one").usage.untrusted


def test_a_forged_header_that_never_closes_is_refused(llm: Any, forged: Path) -> None:
    """JSON nested deeper than Python reads, under digests that are right."""
    content = (50_000).to_bytes(8, "little") + b"[" * 50_000
    kept = read_manifest(SnapshotFolder(forged))
    data = kept["encodings"][0]["data"]
    data |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (forged / data["file"]).write_bytes(content)
    (forged / "manifest.json").write_bytes(manifest_bytes(kept))
    with Choreography(llm) as c:
        with pytest.raises(KeptError, match=data["file"]):
            c.load(forged)
        assert not c.stats()["messages"]
        c.decode([5, 6], parents=[c.prefill([7] * 40)], sampling_params=params(2))


def _loaded(llm: Any, folder: Path) -> list[Any]:
    with Choreography(llm) as c:
        return c.load(folder)


def test_who_saves_untrusted_messages_passes_that_on(
    llm: Any, forged: Path, tmp_path: Path
) -> None:
    rng = random.Random(5)
    with Choreography(llm) as c:
        c.load(forged)
        mine = c.prefill(random_tokens(rng, 30), save_as="mine")
        c.prefill(random_tokens(rng, 30), parents=["one"], save_as="child")
        c.save(None, tmp_path / "passed", encodings=True)
    found = {m.id.partition("/")[2]: m for m in _loaded(llm, tmp_path / "passed")}
    untrusted = {name for name, m in found.items() if m.usage.untrusted}
    assert untrusted == {"one", "two", "child"} and found["mine"].token_ids == mine.token_ids


def test_untrusted_keys_are_left_by_who_wants_none(
    llm: Any, forged: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_mismatch="encode"` takes recipes alone, and so is a folder of recipes nothing to fear."""
    with Choreography(llm) as c:
        messages = c.load(forged, on_mismatch="encode")
        assert c.stats()["num_resident"] == 0
        answer = said_by(c, "one")
        assert not answer.usage.untrusted and answer.usage.exact
        assert not any(m.usage.untrusted for m in messages)
    other = saved.recipes.with_name("other.key")
    other.write_text("k" * 32)
    for folder, expected in ((saved.keys, True), (saved.recipes, False)):
        with Choreography(llm) as c:
            key = SnapshotFolder(folder, keep_key=other.read_bytes())
            assert {m.usage.untrusted for m in c.load(key)} == {expected}
