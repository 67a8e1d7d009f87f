# SPDX-License-Identifier: Apache-2.0
"""Messages that are repaired by layers outlive their engine with what the layers were given."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.engine.oracle import random_tokens
from tests.engine.programs import GREEDY
from vllm_choreo import Choreography
from vllm_choreo.errors import KeptError, LimitError, UnsupportedOptionError

_SETTINGS = {"choreo": {"hidden_memory_gib": 2**-9}}
_CALLS: list[dict[str, Any]] = [
    {"parents": ["one", "two"], "layers": (1, 3)},
    {"parents": ["two", "three", "one"], "layers": [(0, 1), (2, 3)]},
    {"parents": ["one", "three"], "repair": {"share": 0.5, "by": "attention"}},
    {"parents": ["said", "one"], "layers": (2, 3)},
]


def _answers(c: Choreography) -> list[Any]:
    # One by one: what runs beside a call changes how its sums are rounded.
    answers = [c.decode([5, 6, 7], **call, sampling_params=GREEDY) for call in _CALLS]
    said = [[{t: p.logprob for t, p in at.items()} for at in a.logprobs] for a in answers]
    c.free(*answers)
    return said


@dataclass(frozen=True)
class Saved:
    """Folders of the same messages, with keys and values and without; and what readers said."""

    keys: Path
    recipes: Path
    answers: list[Any]
    plain: Path
    said: tuple[int, ...]


@pytest.fixture(scope="module")
def saved(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    folder, rng = tmp_path_factory.mktemp("kept"), random.Random(1)
    llm = engine_slot(tiny_model_path("llama"), additional_config=_SETTINGS)
    with Choreography(llm) as c:
        for name in ("one", "two", "three"):
            c.prefill(random_tokens(rng, 70), save_as=name, keep_hidden=[1, 2])
        # Its own recipe holds a parent that is repaired by layers.
        read = {"parents": ["one", "two"], "layers": (1, 3), "keep_hidden": [2]}
        c.decode([8] * 9, **read, sampling_params=GREEDY, save_as="said")
        answers = _answers(c)
        kept = c.save(["one", "two", "three", "said"], folder / "keys", encodings=True)
        assert kept.encodings > 4, "and copies"
        c.save(None, folder / "recipes")
    with Choreography(llm) as c:
        c.prefill([7] * 50, keep_hidden=[1], save_as="one")
        c.save(["one"], folder / "plain", encodings=True)
        said = c.decode([5], parents=["one"], sampling_params=GREEDY).generated_token_ids
    (name,) = (f for f in sorted((folder / "keys").glob("*.safetensors"))[:1])
    with safe_open(name, "pt") as file:
        assert file.get_tensor("layers.2.hidden").shape == (70, 128)
    return Saved(folder / "keys", folder / "recipes", answers, folder / "plain", said)


@pytest.fixture
def llm(
    saved: Saved, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Any:
    """Another engine than that which saved."""
    return engine_slot(tiny_model_path("llama"), additional_config=_SETTINGS, max_num_seqs=7)


def _agree(one: list[Any], other: list[Any]) -> bool:
    pairs = [
        abs(a[token] - b[token])
        for steps in zip(one, other, strict=True)
        for a, b in zip(*steps, strict=True)
        for token in a.keys() & b.keys()
    ]
    return max(pairs) < 1e-4


@pytest.mark.parametrize("what", ["keys", "recipes"])
def test_readers_by_layers_say_what_they_said(llm: Any, saved: Saved, what: str) -> None:
    """Nothing is encoded but what they repair; evicted, all of it comes back the same."""
    with Choreography(llm) as c:
        before = c.stats()["num_hidden_bytes"]
        c.load(getattr(saved, what))
        assert c.stats()["num_hidden_bytes"] > before
        if what == "keys":
            # Copies that calls with these layers read have been saved, too.
            reader = c.decode([5, 6, 7], **_CALLS[0], sampling_params=GREEDY)
            assert reader.usage.encoded_tokens == reader.num_tokens
            c.free(reader)
        assert _agree(_answers(c), saved.answers)
        c.evict("one", "two", "three", "said")
        assert _agree(_answers(c), saved.answers)
    with Choreography(llm) as c:
        c.prefill([3])
        stats = c.stats()
        assert (stats["num_hidden_bytes"], stats["num_copies"]) == (0, 0)


def test_two_loads_have_hidden_states_of_their_own(llm: Any, saved: Saved) -> None:
    """Keys and values are shared, and each may go when it will."""
    with Choreography(llm) as first, Choreography(llm) as second:
        first.load(saved.keys)
        kept = first.stats()["num_hidden_bytes"]
        second.load(saved.keys)
        assert second.stats()["num_hidden_bytes"] == 2 * kept
        first.free("one", "two", "three", "said")
        assert _agree(_answers(second), saved.answers)


def test_a_file_that_is_damaged_behind_the_keys_is_refused(
    llm: Any, saved: Saved, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in saved.keys.iterdir():
        content = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            content[-5] ^= 1
        (folder / path.name).write_bytes(content)
    with Choreography(llm) as c:
        with pytest.raises(KeptError, match="digest"):
            c.load(folder)
        assert c.stats()["num_hidden_bytes"] == 0
        c.load(folder, on_mismatch="encode")
        assert _agree(_answers(c), saved.answers)


def test_engines_without_room_refuse_by_name(
    saved: Saved, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path("llama")
    small = engine_slot(path, additional_config={"choreo": {"hidden_memory_gib": 2**-13}})
    with Choreography(small) as c:
        with pytest.raises(LimitError, match="hidden_memory_gib"):
            c.load(saved.keys)
        assert c.stats()["num_hidden_bytes"] == c.stats()["num_messages"] == 0
    with Choreography(engine_slot(path)) as c:
        with pytest.raises(UnsupportedOptionError, match="hidden_memory_gib"):
            c.load(saved.keys)
        assert c.stats()["num_messages"] == 0


def test_what_nobody_repairs_by_layers_needs_no_hidden_states(
    saved: Saved, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    with Choreography(engine_slot(tiny_model_path("llama"))) as c:
        c.load(saved.plain)
        reader = c.decode([5], parents=["one"], sampling_params=GREEDY)
        assert reader.generated_token_ids == saved.said
        assert reader.usage.encoded_tokens == reader.num_tokens
