# SPDX-License-Identifier: Apache-2.0
"""The packed forward: equal to the dense oracle, to ordinary text, and to its own differences."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.choreographies import Draw
from tests.engine.oracle import Oracle, random_tokens
from tests.grids import sampled
from tests.lab.train.packings import draw_calls, load, oracle_logprobs, packed_model
from vllm_choreo.errors import (
    ChoreoError,
    OffsetError,
    SpanError,
    TooLongError,
    UnsupportedModelError,
)
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.packing import PackedCall, Packing, SeenSpan, pack, pack_as_text
from vllm_choreo.testing.models.tiny import TINY_MODELS

TOLERANCE = 1e-4  # of a log-probability in float32; measured: at most 2.4e-5
_NAMES = sorted(name for name, model in TINY_MODELS.items() if model.is_trainable)
_SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
_SEEDS = range(5)  # times 9 architectures: 45 choreographies


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Callable[[str], Path]) -> Callable[[str], PackedModel]:
    return cache(lambda name: packed_model(tiny_model_path(name)))


def _logprobs(model: PackedModel, packing: Packing) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(packing).log_softmax(-1)


@pytest.mark.parametrize("seed", sampled(_SEEDS, 2))
@pytest.mark.parametrize("name", _NAMES)
def test_random_choreographies_equal_the_oracle(
    tiny: Callable[[str], PackedModel], tiny_oracle: Callable[[str], Oracle], name: str, seed: int
) -> None:
    calls = draw_calls(seed)
    expected = oracle_logprobs(calls, [tiny_oracle(name)] * len(calls))
    torch.testing.assert_close(_logprobs(tiny(name), pack(calls)), expected, rtol=0, atol=TOLERANCE)


def _chain(pieces: Sequence[Sequence[int]], shift: int = 0) -> list[PackedCall]:
    """Each piece with all pieces before it as parents, as text lies, from `shift` on."""
    calls: list[PackedCall] = []
    starts = [shift]
    for number, piece in enumerate(pieces):
        parents = tuple(SeenSpan(i, 0, len(pieces[i]), starts[i]) for i in range(number))
        calls.append(PackedCall(tuple(piece), parents, starts[-1]))
        starts.append(starts[-1] + len(piece))
    return calls


@pytest.mark.parametrize("name", _NAMES)
def test_a_chain_is_the_ordinary_forward(
    tiny: Callable[[str], PackedModel], tiny_model_path: Callable[[str], Path], name: str
) -> None:
    rng = random.Random(1)
    pieces = [random_tokens(rng, length) for length in (17, 1, 40, 8)]
    tokens = list(itertools.chain.from_iterable(pieces))
    with torch.no_grad():
        text = load(tiny_model_path(name))(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for shift in (0, 911):
        found = _logprobs(tiny(name), pack(_chain(pieces, shift)))
        torch.testing.assert_close(found, text, rtol=0, atol=TOLERANCE)


def _reader() -> list[PackedCall]:
    """A call that reads one message twice, a part of another, with a gap and an overlap."""
    rng = random.Random(2)
    first, second = tuple(range(3, 20)), tuple(range(30, 50))
    shared = PackedCall(second, (SeenSpan(0, 0, 17, 5),), 100)
    parents = (SeenSpan(0, 0, 17, 40), SeenSpan(1, 4, 15, 3), SeenSpan(0, 2, 9, 400))
    return [PackedCall(first), shared, PackedCall((*random_tokens(rng, 9),), parents, 45, 6)]


def _loss(model: PackedModel, packing: Packing) -> torch.Tensor:
    logits = model.logits(packing, packing.trained_rows)
    return torch.nn.functional.cross_entropy(logits, packing.trained_ids)


def _in_float64(path: Path) -> PackedModel:
    """A model without the float32 inside the norms of transformers, which hides differences."""
    model = load(path, torch.float64)
    is_gemma = model.config.model_type.startswith("gemma")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=1e-6, dtype=torch.float64)
                norm.weight.data = child.weight.data + float(is_gemma)
                setattr(module, name, norm)
    return PackedModel(model)


@pytest.mark.parametrize("name", sampled(["gemma2", "llama", "qwen3", "glm4", "gpt_neox"], 2))
def test_gradients_equal_finite_differences(
    tiny_model_path: Callable[[str], Path], name: str
) -> None:
    """Along random directions: through all weights, and through the tokens of a parent."""
    model = _in_float64(tiny_model_path(name))
    packing = pack(_reader())
    _loss(model, packing).backward()
    generator = torch.Generator().manual_seed(3)
    embedding = model.model.get_input_embeddings().weight
    # Tokens of the first message alone: the trained call sees them through cached keys only.
    of_parent = torch.zeros_like(embedding)
    of_parent[3:20] = torch.randn(17, embedding.shape[1], generator=generator).double()
    directions = [{embedding: of_parent}]
    parameters = list(model.model.parameters())
    for _ in range(2):
        drawn = [torch.randn(p.shape, generator=generator).double() for p in parameters]
        directions.append(dict(zip(parameters, drawn, strict=True)))
    for direction in directions:
        analytic = sum(float((p.grad * d).sum()) for p, d in direction.items())
        numeric = _difference(model, packing, direction, 1e-6)
        assert abs(analytic) > 1e-3
        assert abs(analytic - numeric) < 1e-6 * max(1, abs(analytic))


@torch.no_grad()
def _difference(
    model: PackedModel,
    packing: Packing,
    direction: dict[torch.Tensor, torch.Tensor],
    step: float,
) -> float:
    """The derivative of the loss along `direction`, by a central difference."""
    losses = []
    for sign in (1, -2):
        for parameter, change in direction.items():
            parameter += sign * step * change
        losses.append(float(_loss(model, packing)))
    for parameter, change in direction.items():
        parameter += step * change
    return (losses[0] - losses[1]) / (2 * step)


def test_gradient_checkpointing_changes_no_gradient(
    tiny_model_path: Callable[[str], Path],
) -> None:
    packing = pack(_reader())
    gradients = []
    for checkpointed in (False, True):
        model = packed_model(tiny_model_path("llama"))
        model.model.train()
        if checkpointed:
            model.checkpoint_gradients()
        _loss(model, packing).backward()
        gradients.append([parameter.grad for parameter in model.model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain)


def test_rows_alone_and_text(tiny: Callable[[str], PackedModel]) -> None:
    """Logits of some rows are those of all; the text of a call predicts the same tokens."""
    calls = draw_calls(8, Draw(max_length=20))
    packing = pack(calls)
    some = tiny("llama").logits(packing, packing.trained_rows)
    torch.testing.assert_close(some, tiny("llama").logits(packing)[packing.trained_rows])
    text = pack_as_text(packing)
    assert torch.equal(text.trained_ids, packing.trained_ids) and len(text.trained_ids) > 10
    # A call whose parents are a chain has the same text as the chain itself.
    pieces = [[5, 6, 7], [8, 9, 10, 11]]
    decode = PackedCall((12, 13), _chain([*pieces, [12, 13]])[-1].parents, 7, 1)
    chain = pack([*_chain(pieces), decode])
    found = _logprobs(tiny("llama"), chain)[chain.trained_rows]
    as_text = pack_as_text(chain)
    expected = _logprobs(tiny("llama"), as_text)[as_text.trained_rows]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_masks_are_bottom_right_causal() -> None:
    packing = pack([PackedCall((1, 2, 3)), PackedCall((4, 5), (SeenSpan(0, 1, 3, 7),), 9)])
    assert packing.masks[0] is None and packing.masks[1] is not None
    assert packing.masks[1].tolist() == [[True, True, True, False], [True] * 4]
    assert packing.key_rows.tolist() == [0, 1, 2, 1, 2, 3, 4]
    assert packing.deltas.tolist() == [0, 0, 0, 6, 6, 0, 0]
    assert packing.positions.tolist() == [0, 1, 2, 9, 10]


def test_bad_input_is_refused(tiny: Callable[[str], PackedModel]) -> None:
    first = PackedCall((5, 6))
    with pytest.raises(SpanError, match="call 1 can read the calls before it alone"):
        pack([first, PackedCall((7,), (SeenSpan(1, 0, 1, 0),), 2)])
    with pytest.raises(SpanError, match="call 0 has 2 tokens"):
        pack([first, PackedCall((7,), (SeenSpan(0, 0, 3, 0),), 2)])
    with pytest.raises(OffsetError, match="0 or more"):
        PackedCall((7,), (), -1)
    with pytest.raises(ChoreoError, match="a header of at least one token"):
        PackedCall((7,), (), 0, 1)
    with pytest.raises(ChoreoError, match="no call to pack"):
        pack([])
    model = tiny("llama")
    with pytest.raises(ChoreoError, match="512 tokens; the transcript is of another model"):
        model.logits(pack([PackedCall((512,))]))
    with pytest.raises(TooLongError, match="reaches position 2048"):
        model.logits(pack([PackedCall((5, 6), (), 2047)]))
    with pytest.raises(ChoreoError, match="has no adapter"):
        model.logits(pack([first]), adapted=[True])
    with pytest.raises(ChoreoError, match=r"PackedModel\.logits"):
        model.model(torch.tensor([[5, 6]]))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=60), "closest"),
        (
            transformers.LlamaConfig(
                **_SMALL,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "depend on the length of the sequence",
        ),
        (transformers.Gemma3TextConfig(**_SMALL), "layers of kind sliding_attention"),
        (transformers.MistralConfig(**_SMALL, sliding_window=9), "uses sliding_window=9"),
        (transformers.RecurrentGemmaConfig(**_SMALL), "later calls of the same packed sequence"),
        (
            transformers.Ministral3Config(
                **_SMALL,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "llama_4_scaling_beta": 0.5,
                    "original_max_position_embeddings": 64,
                },
            ),
            "queries scaled by their position",
        ),
        (transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2), "attention interface"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_what_does_not_fit_is_refused(config: transformers.PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        PackedModel(transformers.AutoModelForCausalLM.from_config(config))


def test_importing_the_room_imports_no_vllm() -> None:
    code = (
        "import sys, vllm_choreo.lab.train.forward, vllm_choreo.lab.train.gate\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'vllm'], 'vllm'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
