# SPDX-License-Identifier: Apache-2.0
"""Random calls that repair what they read, each checked against the oracle as it is made."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN, check_tokens
from tests.engine.oracle import Encoded, Oracle, Parent, random_tokens
from vllm_choreo import Choreography
from vllm_choreo.semantics.message import Message

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5, detokenize=False
)


@dataclass
class Program:
    """Random calls, and the oracle's encoding of each message; what is repaired, subclasses say.

    Attributes:
        made: messages, and what the oracle says that they are.
        reads: by the identity of the latter, the options of its call and what this read.
    """

    c: Choreography
    oracle: Oracle
    rng: random.Random
    made: list[tuple[Any, Encoded]] = field(default_factory=list)
    reads: dict[int, tuple[dict[str, Any], list[Parent]]] = field(default_factory=dict)

    def options(self) -> tuple[dict[str, Any], list[Parent]]:
        """Of a call, and what it lists."""
        raise NotImplementedError

    def repaired(
        self, options: dict[str, Any], parents: list[Parent], header: list[int]
    ) -> list[Parent]:
        """What a call reads for what it lists."""
        raise NotImplementedError

    def oracle_of(self, options: dict[str, Any]) -> Oracle:
        """Of a call with these options."""
        return self.oracle

    def check(self, message: Message, options: dict[str, Any]) -> None:
        """What else holds for the message of a call with these options."""

    def spans(self) -> tuple[list[tuple[Any, int, int]], list[Parent], int]:
        """Up to three messages or parts of them, how they are stored, and where they end."""
        rng, spans, parents, offset = self.rng, [], [], 0
        # With replacement: one message may be read twice, repaired differently.
        for message, encoded in rng.choices(self.made, k=rng.randint(0, 3)) if self.made else []:
            start = rng.randrange(message.num_tokens) if rng.random() < 0.4 else 0
            stop = rng.randint(start + 1, message.num_tokens) if start else message.num_tokens
            offset = max(0, offset + rng.choice((0, 0, -20, 40)))
            spans.append((message, start, stop))
            parents.append(Parent(encoded, offset, start, stop))
            offset += stop - start
        return spans, parents, offset

    def step(self) -> None:
        """One call, or two in parallel."""
        drawn = [self.options() for _ in range(self.rng.choice((1, 1, 2)))]
        headers = [random_tokens(self.rng, self.rng.choice((1, 5, 31, 32, 33, 70))) for _ in drawn]
        is_decode = len(self.made) > 1 and self.rng.random() < 0.7
        key = "header" if is_decode else "tokens"
        items = [{key: header, **named} for header, (named, _) in zip(headers, drawn, strict=True)]
        messages = (
            self.c.decode(items, sampling_params=GREEDY) if is_decode else self.c.prefill(items)
        )
        for message, header, (named, listed) in zip(messages, headers, drawn, strict=True):
            self.check(message, named)
            read = self.repaired(named, listed, header)
            oracle = self.oracle_of(named)
            encoded = oracle.encode(message.token_ids, read, named["new_offset"])
            if is_decode:
                check_tokens(message, encoded, len(header), LOGPROB_TOLERANCE, TIE_MARGIN)
            self.made.append((message, encoded))
            self.reads[id(encoded)] = named, read
