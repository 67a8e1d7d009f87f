# SPDX-License-Identifier: Apache-2.0
"""What each step of a workflow encodes and reads, on both sides, by running it without a model.

The workflows, their lengths and the prefix cache are those of `python -m benchmarks.gpu step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.clients import Choreographed, Client, ReEncoded, Said
from benchmarks.gpu.toy_engine import Step, Tokens, ToyEngine
from vllm_choreo.ops.sharing import MAX_SHARED_QUERIES, MIN_SHARED_TOKENS

# A step does one of these.
PREFILL, FIRST, DECODE = range(3)
_ALL_STEPS = 10**6  # of an answer are counted one by one


@dataclass
class Counts:
    """Steps of a workflow, one entry of every list each.

    Attributes:
        kind: PREFILL: messages that are given; FIRST: up to the first tokens of some calls; DECODE.
        calls: that the step is one of; of no call that generates: 0.
        tokens: that are encoded.
        requests: of the step.
        read: keys and values that attention reads: each request for itself, or together.
        pairs: of a query and a key that it sees.
        spans: of all requests, their own included.
        is_planned: whether spans are laid out anew.
    """

    kind: Any = field(default_factory=list)
    calls: Any = field(default_factory=list)
    tokens: Any = field(default_factory=list)
    requests: Any = field(default_factory=list)
    read: Any = field(default_factory=list)
    pairs: Any = field(default_factory=list)
    spans: Any = field(default_factory=list)
    is_planned: Any = field(default_factory=list)

    def add(self, **entry: int) -> None:
        """A step."""
        for name, value in entry.items():
            getattr(self, name).append(value)

    def arrays(self) -> Counts:
        """The same as arrays."""
        return Counts(**{f.name: np.array(getattr(self, f.name), float) for f in fields(self)})


class CountingEngine(ToyEngine):
    """Takes every step, and computes nothing."""

    def __init__(self, is_grouped: bool) -> None:
        self.model: Any = SimpleNamespace(
            shape=SimpleNamespace(vocab_size=200), device=torch.device("cpu")
        )
        self.num_blocks = 10**9
        self.counts, self.kind, self.num_calls = Counts(), PREFILL, 0
        self._is_grouped, self._is_planned = is_grouped, False
        self.reset()

    def spans(self, step: Step, *, is_grouped: bool) -> Any:
        """Note that spans are laid out."""
        self._is_planned = True
        return SimpleNamespace(advance=lambda: None)

    def gathered(self, step: Step) -> Any:
        """Note nothing."""
        return None

    def encode(self, step: Step, attend: Any) -> torch.Tensor:
        """Count a step, and take it."""
        pairs = sum(count * seen(s, count) - count * (count - 1) // 2 for s, count in step)
        self.counts.add(
            kind=self.kind,
            # The last tokens of the answers that are read are requests of the step, but no calls.
            calls=self.num_calls if self.kind == FIRST else 0,
            tokens=sum(count for _, count in step),
            requests=len(step),
            read=_read_together(step) if self._is_grouped else sum(seen(*s) for s in step),
            pairs=pairs,
            spans=sum(len(s.parents) + 1 for s, _ in step),
            is_planned=int(self._is_planned),
        )
        self._is_planned = False
        for sequence, count in step:
            sequence.num_encoded += count
        return torch.zeros(len(step), 1)


def seen(sequence: Tokens, count: int) -> int:
    """Tokens that the last query of a sequence sees, once `count` more are encoded."""
    parents = sum(len(parent.token_ids) for parent, _ in sequence.parents)
    return parents + sequence.num_encoded + count


def _read_together(step: Step) -> int:
    """Tokens that are read where readers of the same messages read them together."""
    readers: dict[int, list[tuple[Tokens, int]]] = {}
    total = 0
    for sequence, count in step:
        total += sequence.num_encoded + count
        for parent, _ in sequence.parents:
            readers.setdefault(id(parent), []).append((parent, count))
    for found in readers.values():
        length = len(found[0][0].token_ids)
        together = [n for _, n in found if n <= MAX_SHARED_QUERIES and length >= MIN_SHARED_TOKENS]
        total += length * (len(found) - len(together) + min(1, len(together)))
    return total


class _Tagged(Client):
    """Tells the engine what its next steps are for."""

    engine: CountingEngine

    def _encode(self, given: Sequence[tuple[list[int], Sequence[Said]]]) -> list[Said]:
        self.engine.kind = PREFILL
        return super()._encode(given)

    def _open(
        self, headers: Sequence[list[int]], heard: Sequence[Sequence[Said]], length: int
    ) -> tuple[list[Tokens], Step]:
        self.engine.kind, self.engine.num_calls = FIRST, len(headers)
        return super()._open(headers, heard, length)

    def _generate(self, sequences: Sequence[Tokens], answers: Sequence[list[int]]) -> list[float]:
        self.engine.kind = DECODE
        return super()._generate(sequences, answers)


class _Choreographed(_Tagged, Choreographed):
    pass


class _Stock(_Tagged, ReEncoded):
    pass


def count_workflow(workflow: Callable[[Any], Any]) -> Mapping[bool, Counts]:
    """Steps of a workflow: choreographed (True), and as text over a prefix cache (False)."""
    ours, stock = CountingEngine(is_grouped=True), CountingEngine(is_grouped=False)
    workflow(_Choreographed(ours, _ALL_STEPS, "choreo"))
    workflow(_Stock(stock, _ALL_STEPS, "baseline"))
    return {True: ours.counts.arrays(), False: stock.counts.arrays()}


def count_readers(read: int, readers: int, answer: int) -> Mapping[bool, Counts]:
    """Steps of some calls in parallel that read one message, each behind a role of its own.

    Roles, of 32 tokens, and the message are known when the calls come; nothing of it is a prefix.

    Args:
        read: tokens of the message, at least 1.
        answer: tokens of each answer.
    """

    def workflow(c: Any) -> None:
        message = c.prefill(" ".join(["m"] * read))
        roles = c.prefill([{"tokens": " ".join([f"r{i}"] * 32)} for i in range(readers)])
        header, lengths = " ".join(["h"] * 16), {"max_tokens": answer}
        c.decode([
            {"header": header, "parents": [role, message], "sampling_params": lengths}
            for role in roles
        ])  # fmt: skip

    return count_workflow(workflow)
