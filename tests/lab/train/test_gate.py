# SPDX-License-Identifier: Apache-2.0
"""An adapter that encodes some calls of a packed sequence: what an engine does call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.engine.adapters import MODULES, Adapter
from tests.engine.oracle import Oracle
from tests.lab.train.packings import draw_calls, load, oracle_logprobs, packed_model
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.packing import pack


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture(scope="module")
def adapted_model(tiny_model_path: Callable[[str], Path], adapter: Adapter) -> PackedModel:
    """The folder that vLLM serves, read by PEFT."""
    base = load(tiny_model_path("llama"))
    return PackedModel(peft.PeftModel.from_pretrained(base, str(adapter.path)))


@pytest.mark.parametrize("seed", range(6))
def test_each_call_by_its_own_adapter(
    tiny_model_path: Callable[[str], Path], tmp_path: Path, seed: int
) -> None:
    """A message keeps what its own adapter made of it, whoever reads it.

    In float64: the random adapter is as large as the weights and log-probabilities reach -22, so
    that float32 alone is off by 1e-4. What is left are the merged weights, made in float32.
    """
    path = tiny_model_path("llama")
    adapter, oracle = Adapter(path, tmp_path, 1), Oracle(path)
    for dense in (adapter.oracle, oracle):
        dense.model.double()
    model = PackedModel(peft.PeftModel.from_pretrained(load(path), str(adapter.path)))
    model.model.double()
    rng, calls = random.Random(seed), draw_calls(seed)
    flags = [rng.random() < 0.5 for _ in calls]
    assert len(set(flags)) == 2
    expected = oracle_logprobs(calls, [adapter.oracle if flag else oracle for flag in flags])
    with torch.no_grad():
        found = model.logits(pack(calls), adapted=flags).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_no_call_and_every_call(
    adapted_model: PackedModel, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    """Adapting no call is the base model to the last bit; every call is the default."""
    calls = draw_calls(11)
    packing, base = pack(calls), packed_model(tiny_model_path("llama"))
    with torch.no_grad():
        none = adapted_model.logits(packing, adapted=[False] * len(calls))
        assert torch.equal(none, base.logits(packing))
        every = adapted_model.logits(packing, adapted=[True] * len(calls))
        assert torch.equal(every, adapted_model.logits(packing))
    assert (every - none).abs().max() > 1  # or the adapter would prove nothing


def test_only_calls_with_the_adapter_train_it(tiny_model_path: Callable[[str], Path]) -> None:
    """The gradient of the adapter comes through the calls that it encodes alone."""
    config = peft.LoraConfig(r=4, target_modules=list(MODULES), init_lora_weights=False)
    model = PackedModel(peft.get_peft_model(load(tiny_model_path("llama")), config))
    calls = draw_calls(12)
    packing = pack(calls)
    trained = [p for p in model.model.parameters() if p.requires_grad]
    assert len(trained) == 3 * 2 * len(MODULES)
    for flags, is_zero in (
        ([False] * len(calls), True),
        ([not call.is_decode for call in calls], False),  # read by the trained calls alone
    ):
        logits = model.logits(packing, packing.trained_rows, flags)
        loss = torch.nn.functional.cross_entropy(logits, packing.trained_ids)
        gradients = torch.autograd.grad(loss, trained)
        # The last layer's queries of a message make nothing that others read.
        assert all((not bool(g.any())) for g in gradients) == is_zero


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"use_dora": True}),
        ("llama", {"modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["embed_tokens"]}),
        ("gpt_neox", {"target_modules": ["query_key_value"], "bias": "all"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_more_than_plain_matrices_is_refused(
    tiny_model_path: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    config = peft.LoraConfig(**{"r": 4, "target_modules": list(MODULES), **options})
    with pytest.raises(UnsupportedOptionError, match="plain LoRA"):
        PackedModel(peft.get_peft_model(load(tiny_model_path(name)), config))


def test_another_kind_of_adapter_and_wrong_flags_are_refused(
    tiny_model_path: Callable[[str], Path], adapted_model: PackedModel
) -> None:
    config = peft.IA3Config(
        target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"
    )
    with pytest.raises(UnsupportedOptionError, match="kind LORA"):
        PackedModel(peft.get_peft_model(load(tiny_model_path("llama")), config))
    with pytest.raises(ChoreoError, match="one flag for each"):
        adapted_model.logits(pack(draw_calls(1)), adapted=[True])
