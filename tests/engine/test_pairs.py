# SPDX-License-Identifier: Apache-2.0
"""Three models that read one another's messages, given and generated: a profile for each pair."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.adapters import Adapter
from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Encoded, Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY
from tests.engine.variants import make_variant
from vllm_choreo import Choreography
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.pair import Cell, PairProfile
from vllm_choreo.semantics.message import Message
from vllm_choreo.trained_adapter import ModelIdentity, adapter_weights

_SETTINGS = {"choreo": {"hidden_memory_gib": 2**-9}}
_NUM_LAYERS = 3
# By writer and reader: layers that the reader encodes anew.
_LAYERS = {"ab": (1, 2), "ac": (2, 3), "cb": (2, 3), "ba": (2, 3)}


class Models(NamedTuple):
    """Models A, B and C that differ in their weights alone, and how to run one of them.

    Attributes:
        start: starts the engine of one; that of another one ends.
        weights: digests of their weights, by their letters.
        oracles: of each, by its letter; each reads what the others have encoded.
        pairs: folder of the profiles.
    """

    start: Callable[[str], Any]
    weights: dict[str, str]
    oracles: dict[str, LayerOracle]
    pairs: Path


def _profile(model: Path, writer: str | None, reader: str | None, layers: Any) -> PairProfile:
    cells = (Cell((layers,), 0.1, 0.1, 9.0, 0.1),)
    identity = ModelIdentity.of(model)
    return PairProfile(identity, writer, reader, _NUM_LAYERS, 9.0, cells, "", (layers,))


@pytest.fixture(scope="module")
def models(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Models:
    first, folder = tiny_model_path("llama"), tmp_path_factory.mktemp("models")
    paths = {"a": first, "b": make_variant(first, folder, 1), "c": make_variant(first, folder, 2)}
    oracles = {"a": LayerOracle(tiny_oracle("llama"))}
    oracles |= {name: LayerOracle(Oracle(paths[name]), oracles["a"]) for name in "bc"}
    pairs = folder / "pairs"
    pairs.mkdir()
    weights = {name: ModelIdentity.of(path).weights for name, path in paths.items()}
    for (writer, reader), layers in _LAYERS.items():
        profile = _profile(paths[reader], weights[writer], None, layers)
        profile.save(pairs / f"{writer}-{reader}.json")
    return Models(
        lambda name: engine_slot(paths[name], additional_config=_SETTINGS),
        weights,
        oracles,
        pairs,
    )


def _whole(*messages: Encoded) -> list[Parent]:
    """Messages one behind the other, as a call sees them that names no offsets."""
    parents: list[Parent] = []
    offset = 0
    for one in messages:
        parents.append(Parent(one, offset, 0, len(one.token_ids)))
        offset += len(one.token_ids)
    return parents


def _check(
    oracle: LayerOracle, answer: Message, read: Sequence[Encoded], layers: Any, num_header: int
) -> Encoded:
    """Compare an answer with that of the dense oracle, which gives its encoding."""
    parents = _whole(*read)
    seen = oracle.repair(parents, [range(*ends) for ends in layers]) if layers else parents
    offset = sum(len(one.token_ids) for one in read)
    expected = oracle.encode(answer.token_ids, seen, offset)
    check_tokens(answer, expected, num_header, LOGPROB_TOLERANCE, TIE_MARGIN)
    assert bool(layers) == bool(answer.usage.repaired_tokens)
    return expected


def test_models_read_one_another_by_the_profile_of_each_pair(
    models: Models, tmp_path: Path
) -> None:
    """A writes and generates, C writes, B reads both and generates, A reads that."""
    rng, (a, b, c) = random.Random(7), models.oracles.values()
    header = random_tokens(rng, 5)
    with Choreography(models.start("a"), repair=models.pairs) as session:
        given = session.prefill(random_tokens(rng, 40), save_as="given")
        said = session.decode(header, parents=[given], save_as="said", sampling_params=GREEDY)
        assert said.usage.exact and not said.usage.repaired_tokens, "its own it reads as they are"
        session.save(None, tmp_path / "a", encodings=True)
    one = a.encode(given.token_ids)
    two = a.encode(said.token_ids, _whole(one), 40)
    with Choreography(models.start("c"), repair=models.pairs) as session:
        noted = session.prefill(random_tokens(rng, 30), save_as="noted")
        session.save(None, tmp_path / "c", encodings=True)
        session.load(tmp_path / "a", on_mismatch="variant")
        read = session.decode(header, parents=["given"], sampling_params=GREEDY)
        _check(c, read, [one], [_LAYERS["ac"]], 5)
    three = c.encode(noted.token_ids)
    with Choreography(models.start("b"), repair=models.pairs) as session:
        session.load(tmp_path / "a", on_mismatch="variant")
        session.load(tmp_path / "c", on_mismatch="variant")
        own = session.prefill(random_tokens(rng, 20))
        four = b.encode(own.token_ids)
        for names, parts, layers in (
            (["given"], [one], [_LAYERS["ab"]]),
            (["said", "given"], [two, one], [_LAYERS["ab"]]),
            (["noted"], [three], [_LAYERS["cb"]]),
            (["given", "noted"], [one, three], [(1, 3)]),
            ([own], [four], []),
            ([own, "said"], [four, two], [_LAYERS["ab"]]),
        ):
            read = session.decode(header, parents=names, sampling_params=GREEDY)
            _check(b, read, parts, layers, 5)
        reply = session.decode(header, parents=["said"], save_as="reply", sampling_params=GREEDY)
        five = _check(b, reply, [two], [_LAYERS["ab"]], 5)
        assert session.stats()["layers_chosen"] == {"1–2": {"profile": 5}, "2–3": {"profile": 2}}
        session.save([reply], tmp_path / "b", encodings=True)
    with Choreography(models.start("a"), repair=models.pairs) as session:
        session.load(tmp_path / "b", on_mismatch="variant")
        read = session.decode(header, parents=["reply"], sampling_params=GREEDY)
        _check(a, read, [five], [_LAYERS["ba"]], 5)


def test_a_freed_message_leaves_no_writer_behind(models: Models, tmp_path: Path) -> None:
    with Choreography(models.start("a"), repair=models.pairs) as session:
        session.prefill([5, 6, 7], save_as="one")
        session.save(None, tmp_path / "a", encodings=True)
    with Choreography(models.start("b"), repair=models.pairs) as session:
        entries = session._session.entries
        (one,) = session.load(tmp_path / "a", on_mismatch="variant")
        assert entries.writer(one.id) == models.weights["a"]
        session.free(one)
        assert entries.writer(one.id) is None


def test_adapters_of_one_engine_read_one_another(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The base reads what an adapter has written, and that adapter what the base has."""
    path = tiny_model_path("llama")
    one, two = (Adapter(path, tmp_path, number) for number in (1, 2))
    weights = adapter_weights(one.path)
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    _profile(path, weights, None, (1, 2)).save(pairs / "one-base.json")
    _profile(path, None, weights, (2, 3)).save(pairs / "base-one.json")
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    llm = engine_slot(path, additional_config=_SETTINGS, **options)
    rng = random.Random(1)
    with Choreography(llm, repair=pairs) as c:
        texts = [random_tokens(rng, 40) for _ in range(3)]
        adapters: list[Any] = [None, one.request, two.request]
        made = [c.prefill(t, adapter=a) for t, a in zip(texts, adapters, strict=True)]
        header = random_tokens(rng, 4)
        for reader, number, layers in (
            (None, 1, [(1, 2)]),
            (one.request, 0, [(2, 3)]),
            (None, 0, None),
            (None, 2, None),
            (two.request, 1, None),
        ):
            given: dict[str, Any] = {"adapter": reader, "sampling_params": GREEDY}
            read = c.decode(header, parents=[made[number]], **given)
            by_hand = c.decode(header, parents=[made[number]], layers=layers or "reuse", **given)
            assert bool(read.usage.repaired_tokens) == bool(layers)
            assert read.token_ids == by_hand.token_ids
            assert read.usage.repaired_tokens == by_hand.usage.repaired_tokens
        said = c.decode(header, adapter=one.request, sampling_params=GREEDY)
        assert c.decode(header, parents=[said], sampling_params=GREEDY).usage.repaired_tokens


def test_what_no_profile_can_be(models: Models, tmp_path: Path) -> None:
    llm = models.start("c")
    with pytest.raises(RepairError, match="exact"):
        Choreography(llm, "exact", repair=models.pairs)
    _profile(Path("elsewhere"), "0" * 64, None, (1, 2)).save(tmp_path / "other.json")
    with pytest.raises(RepairError):
        Choreography(llm, repair=tmp_path)
    with pytest.raises(RepairError):
        Choreography(llm, repair=str(models.pairs))  # of a client's it could not be told
