# SPDX-License-Identifier: Apache-2.0
"""Readers of shared messages on one engine, on all sides of the comparison."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from benchmarks.harness.checks import logprobs_of, require_alike
from benchmarks.harness.engine import (
    BLOCK_SIZE,
    draw_tokens,
    forced,
    kv_block_bytes,
    only_token,
    set_shared_reading,
)
from benchmarks.harness.steps import StepWatch, multiply_rate, read_bandwidth
from benchmarks.scaling.rows import DECODE_CONTEXT
from benchmarks.scaling.stock_prefix import StockPrefix

MESSAGE_TOKENS = 500
# That vLLM prefills in a step: its default, 4096, is slower for the text on this kind of machine
# (830 tokens/s, against 1,500 with 512 to 2,048; the larger temporaries are mapped anew).
CHUNK_TOKENS = 2048
DECODE_TOKENS = 12
ROLE_TOKENS, HEADER_TOKENS = 24, 8


class Readers:
    """The engine with the shared messages, encoded once; texts of their own for all readers."""

    def __init__(self, llm: Any, stock: StockPrefix | None, num_tokens: int) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.stock = stock
        self.choreo, self.text = Choreography(llm), Choreography(llm, mode="baseline")
        self._texts = itertools.count()
        self.messages: list[Any] = []
        self.plain: list[Any] = []
        for start in range(0, num_tokens, MESSAGE_TOKENS):
            tokens = draw_tokens(start, MESSAGE_TOKENS)
            # With all before as parents, so that the messages in this order mean what text means.
            self.messages.append(self.choreo.prefill(tokens, parents=list(self.messages)))
            self.plain.append(self.text.prefill(tokens))

    def own_tokens(self, num_tokens: int) -> list[int]:
        """Tokens that no other text begins with."""
        number = next(self._texts)
        return [1000 + number % 40000, 1000 + number // 40000, *range(500, 498 + num_tokens)]

    def shared(self, side: str, num_tokens: int) -> list[Any]:
        """The first `num_tokens` shared tokens, in as many messages as that takes."""
        messages = self.plain if side in ("prefix", "text") else self.messages
        return messages[: num_tokens // MESSAGE_TOKENS]

    # -- outputs -----------------------------------------------------------------------------

    def check_outputs(self, num_readers: int = 3) -> None:
        """Where all sides mean the same, the model must say the same."""
        headers = [self.own_tokens(HEADER_TOKENS) for _ in range(num_readers)]
        found = {}
        for side in ("prefix", "grouped", "ungrouped"):
            self._switch(side)
            c = self.text if side == "prefix" else self.choreo
            calls = [{"header": h, "parents": self.shared(side, DECODE_CONTEXT)} for h in headers]
            params = forced(self.llm, DECODE_TOKENS, logprobs=1)
            answers = c.decode(calls, sampling_params=params)
            c.free(*answers)
            found[side] = [
                logprobs_of(answer.logprobs or (), only_token(self.llm)) for answer in answers
            ]
        if self.stock:
            found["stock"] = self.stock.logprobs(self.prefix(), headers, DECODE_TOKENS)
        wanted = list(itertools.chain(*found.pop("prefix")))
        for side, logprobs in found.items():
            require_alike(f"{side} and the prefix", itertools.chain(*logprobs), wanted)

    def prefix(self) -> list[int]:
        """The messages that are read while decoding, as text."""
        shared = self.shared("prefix", DECODE_CONTEXT)
        return [token for message in shared for token in message.token_ids]

    def _switch(self, side: str) -> None:
        set_shared_reading(self.llm, side != "ungrouped")

    # -- what is timed -----------------------------------------------------------------------

    def first_token(self, side: str, num_tokens: int, num_readers: int) -> dict[str, Any]:
        """Readers with a role of their own: seconds from their submission to first tokens.

        Choreographed, the roles are encoded first, in a step of their own, which is counted.
        """
        self._switch(side)
        c = self.choreo if side == "choreo" else self.text
        shared = self.shared(side, num_tokens)
        if side == "prefix":  # whatever else vLLM cached meanwhile, this it has
            c.free(c.decode([7], parents=shared, sampling_params=forced(self.llm, 1)))
        roles = c.prefill([{"tokens": self.own_tokens(ROLE_TOKENS)} for _ in range(num_readers)])
        calls = [
            {
                "header": self.own_tokens(HEADER_TOKENS),
                "parents": [*shared, role] if side == "prefix" else [role, *shared],
            }
            for role in roles
        ]
        # So many that the first reader still runs when the last one's text has been prefilled.
        num_new = 3 + num_readers * num_tokens // CHUNK_TOKENS
        with StepWatch(self.llm) as watch:
            answers = c.decode(calls, sampling_params=forced(self.llm, num_new))
        c.free(*answers, *roles)
        before = max(role.metrics.ttft for role in roles)
        times = sorted(before + answer.metrics.ttft for answer in answers)
        reused = min(answer.usage.reused_tokens for answer in answers)
        expected = {"choreo": num_tokens + ROLE_TOKENS, "text": 0}
        expected["prefix"] = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if reused != expected[side]:
            raise SystemExit(f"{side}: {reused} tokens came from the cache, not {expected[side]}")
        return {
            "median_s": round(times[len(times) // 2], 5),
            "last_s": round(times[-1], 5),
            "blocks": self._blocks(watch, side, len(shared)),
        }

    def decode(self, side: str, num_readers: int) -> list[float]:
        """Seconds of each decode step of the readers."""
        if side == "stock":
            assert self.stock is not None
            headers = [self.own_tokens(HEADER_TOKENS) for _ in range(num_readers)]
            return self.stock.step_seconds(self.prefix(), headers, DECODE_TOKENS)
        self._switch(side)
        c = self.text if side == "prefix" else self.choreo
        shared = [] if side == "no context" else self.shared(side, DECODE_CONTEXT)
        calls = []
        for i in range(num_readers):
            turn = i % len(shared) if side == "own orders" else 0
            parents = [*shared[turn:], *shared[:turn]]
            calls.append({"header": self.own_tokens(HEADER_TOKENS), "parents": parents})
        with StepWatch(self.llm) as watch:
            answers = c.decode(calls, sampling_params=forced(self.llm, DECODE_TOKENS))
        c.free(*answers)
        texts = {answer.generated_token_ids for answer in answers}
        if texts != {(only_token(self.llm),) * DECODE_TOKENS}:
            raise SystemExit(f"{side}: other tokens than were forced")
        return watch.decode_seconds(num_readers)

    def _blocks(self, watch: StepWatch, side: str, num_read: int) -> int:
        """Blocks that the readers use: messages that lie there unread do not count."""
        is_text = side in ("prefix", "text")
        num_idle = len(self.messages) - (0 if is_text else num_read)
        return watch.peak_blocks() - num_idle * -(-MESSAGE_TOKENS // BLOCK_SIZE)

    def speeds(self) -> dict[str, Any]:
        """Of this machine and model, for the cost models."""
        from vllm_choreo.testing.models.embedded import embedded_model

        # From the file, since vLLM packs the weights of linear layers away.
        weights = _num_weights(embedded_model())
        config = self.llm.model_config.hf_text_config
        layer_kv = DECODE_CONTEXT * kv_block_bytes(self.llm) // BLOCK_SIZE
        return {
            "memory_bytes_per_s": round(read_bandwidth(1 << 30)),
            "cache_bytes_per_s": round(read_bandwidth(layer_kv // config.num_hidden_layers)),
            "flops": round(multiply_rate()),
            "weight_bytes": 4 * weights,
            "layer_weights": weights - config.vocab_size * config.hidden_size,
            "attention_width": config.num_hidden_layers * config.hidden_size,
            "block_bytes": kv_block_bytes(self.llm),
            "block_size": BLOCK_SIZE,
        }


def _num_weights(model: Path) -> int:
    """Of a model on disk; embedding and lm_head of the embedded one are the same tensor."""
    from safetensors import safe_open

    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return total
