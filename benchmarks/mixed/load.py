# SPDX-License-Identifier: Apache-2.0
"""A closed loop on one engine: half of the slots hold ordinary requests, half of them readers."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.checks import logprobs_of, require_alike
from benchmarks.harness.engine import draw_tokens, forced, only_token, scheduler_of
from benchmarks.mixed.work import (
    ANSWER_TOKENS,
    HEADER_TOKENS,
    MESSAGE_TOKENS,
    NUM_MESSAGES,
    PROMPT_TOKENS,
    SIDES,
    SLOTS,
)


@dataclass
class _Slot:
    """One place in the loop and the request that is in it."""

    is_ordinary: bool
    random: random.Random
    request_id: str = ""
    submitted: float = 0.0
    first: float | None = None
    num_prompt: int = 0
    num_done: int = 0
    num_tokens: int = 0  # of the requests that are done, prompts included


class Load:
    """The engine, the messages, and the same tokens as a prefix."""

    def __init__(self, llm: Any) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.engine = llm.llm_engine
        self.c = Choreography(llm)
        self.messages: list[Any] = []
        for i in range(NUM_MESSAGES):
            tokens = draw_tokens(i * MESSAGE_TOKENS, MESSAGE_TOKENS)
            self.messages.append(self.c.prefill(tokens, parents=list(self.messages)))
        self.prefix = [token for message in self.messages for token in message.token_ids]
        self._numbers = itertools.count()

    # -- requests ------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int], params: Any) -> str:
        """Add a request with these tokens; returns its id."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = params.clone()
        params.output_kind = RequestOutputKind.CUMULATIVE  # an output per step, to time the first
        request_id = f"mixed-{next(self._numbers)}"
        self.engine.add_request(request_id, tokens_input(list(prompt)), params)
        return request_id

    def submit_reader(
        self, side: str, header: Sequence[int], messages: Sequence[Any], params: Any
    ) -> str:
        """A call that reads these messages in this order; as text, as many tokens of the prefix."""
        from vllm_choreo.semantics.naming import ParentSpan
        from vllm_choreo.semantics.params import ChoreoParams

        if side == "cached prefix":
            num_read = sum(message.num_tokens for message in messages)
            return self.submit([*self.prefix[:num_read], *header], params)
        parents = tuple(ParentSpan(message.id) for message in messages)
        call = ChoreoParams(parents=parents, session=self.c.session)
        return self.submit(header, call.apply(params))

    def new_token(self) -> int:
        """One that no prompt of this run begins with yet."""
        return 10_000 + next(self._numbers)

    def drain(self) -> list[Any]:
        """Step until all requests are finished; the final outputs."""
        outputs = []
        while self.engine.has_unfinished_requests():
            outputs += [output for output in self.engine.step() if output.finished]
        return outputs

    def forget(self) -> None:
        """Free the messages that the calls made: not those that were there before."""
        from vllm_choreo.engine.utility import call

        kept = {message.id for message in self.messages}
        found = [
            m.id for m in scheduler_of(self.llm).store.messages(self.c.session) if m.id not in kept
        ]
        call(self.llm, "free", self.c.session, found)

    def check_outputs(self) -> None:
        """An ordinary request and a reader say the same on both sides."""
        found = []
        for side in SIDES:
            params = forced(self.llm, 8, logprobs=1)
            self.submit_reader(side, range(700, 716), self.messages, params)
            self.submit(range(900, 1000), params)
            outputs = sorted(self.drain(), key=lambda output: int(output.request_id[6:]))
            steps = itertools.chain(*(output.outputs[0].logprobs for output in outputs))
            found.append(logprobs_of(steps, only_token(self.llm)))
            self.forget()
        require_alike("both sides", *found)

    # -- the load ------------------------------------------------------------------------------

    def run(self, side: str, num_ordinary: int, seed: int) -> list[dict[str, Any]]:
        """Run until so many ordinary requests have ended; a row for each of them.

        Each slot draws its own lengths, so that what a slot submits does not depend on the
        order in which others end.
        """
        slots = [_Slot(i < SLOTS, random.Random(100 * seed + i)) for i in range(2 * SLOTS)]
        rows: list[dict[str, Any]] = []
        start = time.perf_counter()
        for slot in slots:
            self._fill(slot, side)
        while len(rows) < num_ordinary:
            outputs = self.engine.step()
            now = time.perf_counter()
            by_id = {slot.request_id: slot for slot in slots}
            for output in outputs:
                slot = by_id[output.request_id]
                slot.first = slot.first or now
                if not output.finished:
                    continue
                slot.num_done += 1
                slot.num_tokens += slot.num_prompt + len(output.outputs[0].token_ids)
                if slot.is_ordinary and slot.num_done > 1:  # at first all slots begin at once
                    rows.append(_row(slot, now))
                self._fill(slot, side)
        seconds = time.perf_counter() - start
        num_readers = sum(slot.num_done for slot in slots if not slot.is_ordinary)
        num_tokens = sum(slot.num_tokens for slot in slots if slot.is_ordinary)
        self.engine.abort_request([slot.request_id for slot in slots])
        self.drain()
        self.forget()
        load = {"load_s": round(seconds, 3), "tokens_per_s": round(num_tokens / seconds, 2)}
        return [{**row, **load, "readers": num_readers} for row in rows]

    def _fill(self, slot: _Slot, side: str) -> None:
        """Submit the slot's next request."""
        draw = slot.random
        params = forced(self.llm, draw.randint(*ANSWER_TOKENS))
        size = draw.randint(*PROMPT_TOKENS) if slot.is_ordinary else HEADER_TOKENS
        # The same lengths on both sides, but never a prompt that vLLM has cached.
        prompt = [self.new_token(), *range(3000, 2999 + size)]
        turn = draw.randrange(NUM_MESSAGES)
        slot.num_prompt, slot.first = size, None
        slot.submitted = time.perf_counter()
        if slot.is_ordinary:
            slot.request_id = self.submit(prompt, params)
        else:
            ordered = [*self.messages[turn:], *self.messages[:turn]]
            slot.request_id = self.submit_reader(side, prompt, ordered, params)


def _row(slot: _Slot, now: float) -> dict[str, Any]:
    assert slot.first is not None
    return {
        "ttft_s": round(slot.first - slot.submitted, 6),
        "latency_s": round(now - slot.submitted, 6),
        "prompt_tokens": slot.num_prompt,
    }
