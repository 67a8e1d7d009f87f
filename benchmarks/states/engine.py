# SPDX-License-Identifier: Apache-2.0
"""One side of the comparison: an engine in a process of its own, and what it is asked."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.child import serve
from benchmarks.harness.engine import (
    empty_caches,
    has_plugin,
    scheduler_of,
    set_environment,
    start_engine,
)

# Name: VLLM_PLUGINS.
SIDES = {"plugin": "choreo", "stock": ""}
ORDER_SIDES = {"composed": "choreo", "stock": ""}  # of `orders`
DENSE = "dense"  # an engine of `make_dense_model`, in place of a hybrid
_VOCAB_SIZE = 512
MAX_MODEL_LEN = 8192
ANSWER_TOKENS = 4


def make_model(folder: Path, num_kv_heads: int = 2) -> Path:
    """Write a Mamba2 hybrid of Granite's form with random weights; its folder.

    Three of its twelve layers have attention. vLLM's blocks hold as many tokens as have keys and
    values of a state's size, 640 or, with one head of keys, 1,024: models in use have 528 to 1,072.
    """
    import torch
    import transformers

    from vllm_choreo.testing.models.tiny import make_tiny_model

    config = transformers.GraniteMoeHybridConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        shared_intermediate_size=1536,
        num_hidden_layers=12,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 3,
        num_attention_heads=8,
        num_key_value_heads=num_kv_heads,
        position_embedding_type="rope",
        attention_multiplier=64**-0.5,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128 if num_kv_heads > 1 else 112,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return make_tiny_model("granite_hybrid", folder, torch.float32, config)


def make_dense_model(folder: Path) -> Path:
    """Write a model of the same shape all of whose layers have attention; its folder."""
    import torch
    import transformers

    from vllm_choreo.testing.models.tiny import make_tiny_model

    config = transformers.LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=True,
    )
    return make_tiny_model("llama", folder, torch.float32, config)


def child(side: str, model: str) -> None:
    """Start an engine, then answer the questions below until there are no more."""
    set_environment()
    if side == "stock":
        _split_prompts_at_blocks()
    options: dict[str, Any] = {} if side == DENSE else {"mamba_cache_dtype": "float32"}
    if side == "composed":
        options["additional_config"] = {"choreo": {"composed_states": True}}
    llm = start_engine(
        None, model, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=2048,
        max_logprobs=_VOCAB_SIZE, **options,
    )  # fmt: skip
    assert has_plugin(llm) == (side != "stock"), "the plugin is where it should not be"
    asked = Asked(llm)
    serve(lambda question: getattr(asked, question.pop("do"))(**question))


def _split_prompts_at_blocks() -> None:
    """Have vLLM end a step where a block of its prefix cache ends, as for most kernels of states.

    For Mamba2 it takes the state at that place out of a longer step. Its kernel for CPUs does not
    give it, and the engine ends with an IndexError: without this, the rival has no prefix cache.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


class Asked:
    """What an engine is asked; all results are what JSON can carry."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def block_size(self) -> int:
        """Tokens of a block of vLLM's prefix cache."""
        groups = scheduler_of(self.llm).kv_cache_config.kv_cache_groups
        return max(group.kv_cache_spec.block_size for group in groups)

    def conversation(
        self, turns: Sequence[Sequence[int]], mode: str, is_forced: bool
    ) -> list[dict[str, Any]]:
        """Turns that are answered one after the other, each behind all that was said.

        Args:
            turns: their tokens.
            mode: of `Choreography`: a chain of messages, or text over vLLM's prefix caching.
            is_forced: all answers are the same tokens.
        """
        from vllm_choreo import Choreography

        empty_caches(self.llm)
        rows = []
        with Choreography(self.llm, mode=mode) as c:
            said: list[Any] = []
            for turn in turns:
                answer = c.decode(list(turn), parents=said, sampling_params=_greedy(is_forced))
                rows.append(
                    {
                        "first_token_s": answer.metrics.ttft,
                        "reused_tokens": answer.usage.reused_tokens,
                        "is_exact": answer.usage.exact,
                        "tokens": list(answer.generated_token_ids),
                    }
                )
                said = [*said, answer]
        return rows

    def readers(
        self,
        documents: Sequence[Sequence[int]],
        orders: Sequence[Sequence[int]],
        questions: Sequence[Sequence[int]],
        mode: str,
    ) -> dict[str, Any]:
        """Questions in one batch, each behind all documents in an order of its own.

        Args:
            documents: their tokens; each is a message, encoded alone before.
            orders: numbers of documents, of each question.
            questions: their tokens.
            mode: of `Choreography`: states are composed, or text over vLLM's prefix caching.
        """
        from vllm_choreo import Choreography

        empty_caches(self.llm)
        with Choreography(self.llm, mode=mode) as c:
            began = time.perf_counter()
            made = c.prefill([{"tokens": list(document)} for document in documents])
            encoded = time.perf_counter()
            answers = c.decode(
                [
                    {"header": list(question), "parents": [made[number] for number in order]}
                    for question, order in zip(questions, orders, strict=True)
                ],
                sampling_params=_greedy(is_forced=True),
            )
            ended = time.perf_counter()
        return {
            "documents_s": encoded - began,
            "readers_s": ended - encoded,
            "first_token_s": [answer.metrics.ttft for answer in answers],
            "reused_tokens": [answer.usage.reused_tokens for answer in answers],
        }

    def divergence(
        self,
        documents: Sequence[Sequence[int]],
        orders: Sequence[Sequence[int]],
        questions: Sequence[Sequence[int]],
    ) -> list[float]:
        """Mean over a question's tokens of KL(text, what is read as it was encoded), in nats."""
        from vllm import SamplingParams

        from vllm_choreo import Choreography

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_VOCAB_SIZE)
        found: list[float] = []
        for question, order in zip(questions, orders, strict=True):
            empty_caches(self.llm)
            with Choreography(self.llm) as c:
                made = c.prefill([{"tokens": list(document)} for document in documents])
                parents = [made[number] for number in order]
                rows = []
                for mode in ("exact", "choreo"):
                    answer = c.decode(
                        list(question), parents=parents, mode=mode, sampling_params=params
                    )
                    of_tokens = filter(None, answer.prompt_logprobs or ())
                    rows.append([*of_tokens])
            found.append(sum(map(_kl, *rows)) / len(rows[0]))
        return found

    def batch(self, prompts: Sequence[Sequence[int]], is_warm: bool) -> dict[str, Any]:
        """Ordinary requests in one batch.

        Args:
            is_warm: whether the prefix cache is as the batch before has left it; else it is empty.
        """
        from vllm.inputs import TokensPrompt

        if not is_warm:
            empty_caches(self.llm)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        began = time.perf_counter()
        outputs = self.llm.generate(inputs, _greedy(False), use_tqdm=False)
        return {
            "seconds": time.perf_counter() - began,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }


def _kl(expected: Mapping[int, Any], found: Mapping[int, Any]) -> float:
    """KL divergence of two distributions over all tokens, in nats."""
    return sum(
        math.exp(entry.logprob) * (entry.logprob - found[token].logprob)
        for token, entry in expected.items()
    )


def _greedy(is_forced: bool) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        allowed_token_ids=[7] if is_forced else None,
    )
