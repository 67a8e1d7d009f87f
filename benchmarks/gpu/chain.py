# SPDX-License-Identifier: Apache-2.0
"""A chain of messages is plain text: the law that must hold before any workflow is timed."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.gpu.report import Report
from benchmarks.gpu.toy_engine import BLOCK_SIZE, Tokens, ToyEngine
from benchmarks.gpu.transformer import Model, Shape

# Relative, of logits after two layers.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_NUM_BLOCKS = 64


def check(report: Report, shape: Shape) -> bool:
    """Whether all ways to encode a text give the logits of one plain forward pass."""
    is_right = True
    for dtype, tolerance in TOLERANCE.items():
        model = Model(
            dataclasses.replace(shape, num_layers=2, vocab_size=256), dtype=dtype,
            device=report.device, max_position=512, num_slots=_NUM_BLOCKS * BLOCK_SIZE,
            use_graphs=report.device.type == "cuda",
        )  # fmt: skip
        for way, error in _errors(ToyEngine(model, _NUM_BLOCKS)).items():
            report.say(f"{way} = plain text, {dtype}: error {error:.1e} (allowed {tolerance:.0e})")
            if not error < tolerance:
                is_right = False
                report.error(f"{way}, {dtype}: error {error:.1e}: no workflow is timed")
    return is_right


def _errors(engine: ToyEngine) -> dict[str, float]:
    torch.manual_seed(0)
    system, question, *headers = (torch.randint(256, (n,)).tolist() for n in (37, 18, 5, 3))
    texts = [system + question + header for header in headers]
    plain = torch.cat([_plain(engine, text) for text in texts])
    found = {
        "chain of messages": _chain(engine, system, question, headers),
        "requests, our kernel": _requests(engine, texts, is_gathered=False),
        "requests with a cached prefix, SDPA": _requests(engine, texts, is_gathered=True),
    }
    return {way: float((x - plain).norm() / plain.norm()) for way, x in found.items()}


def _plain(engine: ToyEngine, text: list[int]) -> torch.Tensor:
    """One pass over a whole text, with attention by a dense causal mask."""
    engine.reset()
    sequence = Tokens(list(text))
    engine.allocate(sequence, len(text))
    heads = engine.model.shape.heads
    slots = torch.tensor(sequence.slots(0, len(text)), device=engine.model.device)
    mask = torch.ones(len(text), len(text), dtype=torch.bool, device=slots.device).tril()

    def attend(layer: int, query: torch.Tensor, output: torch.Tensor) -> None:
        cached = engine.model.cache[layer][slots].double()
        group = heads.num_heads // heads.num_kv_heads
        keys, values = cached.repeat_interleave(group, dim=1).chunk(2, dim=-1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * heads.head_size**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        output.copy_(torch.einsum("hqk,khd->qhd", weights, values))

    return engine.encode([(sequence, len(text))], attend).double()


def _chain(
    engine: ToyEngine, system: list[int], question: list[int], headers: list[list[int]]
) -> torch.Tensor:
    """Messages that are encoded elsewhere than they are read; two headers read them together."""
    engine.reset()
    first = Tokens(list(system), position=101)
    second = Tokens(list(question), position=len(system), parents=[(first, 0)])
    parents = [(first, 0), (second, len(system))]
    position = len(system) + len(question)
    last = [Tokens(list(header), position, parents) for header in headers]
    logits = torch.empty(0)
    for group in ([first], [second], last):
        step = [(sequence, len(sequence.token_ids)) for sequence in group]
        for sequence, count in step:
            engine.allocate(sequence, count)
        logits = engine.encode(step, engine.spans(step, is_grouped=True))
    return logits.double()


def _requests(engine: ToyEngine, texts: list[list[int]], is_gathered: bool) -> torch.Tensor:
    """Whole texts, one after the other, so that the later ones find a prefix in the cache."""
    engine.reset()
    found = []
    for text in texts:
        sequence = Tokens(list(text))
        engine.take_prefix(sequence)
        engine.allocate(sequence, len(text))
        engine.keep_prefix(sequence, len(text))
        step = [(sequence, len(text) - sequence.num_encoded)]
        attend = engine.gathered(step) if is_gathered else engine.spans(step, is_grouped=False)
        found.append(engine.encode(step, attend))
    assert sequence.num_encoded > step[0][1], "no prefix was found"
    return torch.cat(found).double()
