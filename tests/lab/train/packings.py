# SPDX-License-Identifier: Apache-2.0
"""Random choreographies as packed transcripts, and what the dense oracle makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.choreographies import Draw, PlannedCall, Ran, draw_choreography, resolve_call
from tests.engine.oracle import Encoded, Oracle, Parent, private_model_class
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.packing import PackedCall, SeenSpan


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model as a user of transformers loads it; "sdpa" would leave out Gemma's soft cap."""
    # Of a class that no engine of this process has changed.
    model: Any = private_model_class(path).from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def packed_model(path: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return PackedModel(load(path, dtype))


def draw_calls(seed: int, draw: Draw | None = None) -> list[PackedCall]:
    """A random choreography whose decodes "generated" random tokens."""
    rng = random.Random(seed)
    done: list[Ran] = []
    for batch in draw_choreography(seed, draw):
        done += [_make_up(rng, call, done) for call in batch]
    return packed_calls(done)


def _make_up(rng: random.Random, call: PlannedCall, done: list[Ran]) -> Ran:
    _, spans, offsets, new_offset = resolve_call(call, done)
    most = call.sampling_params.max_tokens if call.sampling_params else 0
    generated = tuple(rng.randint(3, 511) for _ in range(rng.randint(1, most) if most else 0))
    tokens = (*call.tokens, *generated)
    message = SimpleNamespace(
        token_ids=tokens, num_tokens=len(tokens), generated_token_ids=generated
    )
    return Ran(call, message, spans, offsets, new_offset)  # type: ignore[arg-type]


def packed_calls(done: Sequence[Ran]) -> list[PackedCall]:
    """Calls that have run, as the trainer takes them."""
    return [
        PackedCall(
            token_ids=tuple(ran.message.token_ids),
            parents=tuple(
                SeenSpan(number, start, stop, offset)
                for (number, start, stop), offset in zip(ran.spans, ran.offsets, strict=True)
            ),
            new_offset=ran.new_offset,
            num_generated=len(ran.message.generated_token_ids),
        )
        for ran in done
    ]


def oracle_logprobs(calls: Sequence[PackedCall], oracles: Sequence[Oracle]) -> torch.Tensor:
    """`[num_tokens, vocab_size]` of all calls, each encoded by an oracle of its own."""
    encoded: list[Encoded] = []
    for call, oracle in zip(calls, oracles, strict=True):
        parents = [
            Parent(encoded[span.call], span.offset, span.start, span.stop) for span in call.parents
        ]
        encoded.append(oracle.encode(call.token_ids, parents, call.new_offset))
    return torch.cat([message.logprobs() for message in encoded])
