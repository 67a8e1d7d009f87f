# SPDX-License-Identifier: Apache-2.0
"""Ordinary requests beside choreographed calls, in the same batches.

    python -m benchmarks.bench_mixed [--long] [--passes 2]

A closed loop: as many slots as there are, each submits its next request when its last one has
ended. Half of them hold ordinary requests. The other half holds choreographed calls on one side,
and on the other ordinary calls of the same work: as many new tokens after a cached prefix as long
as the messages. Lengths are drawn from a seed and are the same on both sides.

Then what it costs ordinary requests that a batch with one choreographed call in it runs through
our attention kernel, and not through vLLM's.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import mixed_page
from benchmarks.common import (
    command_line,
    forced,
    machine,
    median,
    only_token,
    scheduler_of,
    set_environment,
    start_engine,
    write_csv,
)
from benchmarks.mixed_page import SIDES
from benchmarks.steps import StepWatch

NUM_MESSAGES, MESSAGE_TOKENS = 4, 512  # whole blocks: the prefix is as long, and all of it cached
SLOTS = 4  # of each half
HEADER_TOKENS = 16
PROMPT_TOKENS = (32, 128)  # of an ordinary request, from, to
ANSWER_TOKENS = (8, 24)
TOLERANCE = 1e-3  # of log-probabilities in float32


def main() -> int:
    args = _arguments()
    set_environment(kv_cache_gib=4)
    import vllm_choreo

    vllm_choreo.register()
    llm = start_engine(max_num_seqs=64, max_num_batched_tokens=2048)
    bench = _Bench(llm)
    bench.check_outputs()
    for side in SIDES:
        bench.load(side, 2 * SLOTS, seed=0)  # what is done once only shall not be timed
    requests: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for number in range(1, args.passes + 1):
        for turn in range(args.turns):
            for side in SIDES if (number + turn) % 2 else SIDES[::-1]:
                for row in bench.load(side, args.requests, seed=turn):
                    requests.append({"pass": number, "turn": turn, "side": side, **row})
            print(f"pass {number} turn {turn}: {mixed_page.in_words(requests)}", flush=True)
        steps += _kernels(bench, number, args.repeats)
    record = {**machine(), "command": command_line("bench_mixed")}
    write_csv("mixed", requests, **record)
    write_csv("mixed_steps", steps, **record)
    print(section())
    return int(not mixed_page.bar_reached(requests))


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    return mixed_page.section()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="more requests and repeats")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--turns", type=int, help="of each side, per pass")
    parser.add_argument("--requests", type=int, default=32, help="ordinary ones, per turn")
    parser.add_argument("--repeats", type=int, help="of each batch for the kernels, per pass")
    args = parser.parse_args()
    args.turns = args.turns or (8 if args.long else 1)
    args.repeats = args.repeats or (15 if args.long else 2)
    return args


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


class _Bench:
    """The engine, the messages, and the same tokens as a prefix."""

    def __init__(self, llm: Any) -> None:
        from vllm_choreo import Choreography

        self.llm = llm
        self.engine = llm.llm_engine
        self.c = Choreography(llm)
        self.messages: list[Any] = []
        for i in range(NUM_MESSAGES):
            tokens = [1000 + (i * MESSAGE_TOKENS + j) * 7919 % 40000 for j in range(MESSAGE_TOKENS)]
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
        from vllm_choreo.semantics.params import ChoreoParams, ParentSpan

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
            m.id
            for m in scheduler_of(self.llm).store.of_session(self.c.session)
            if m.id not in kept
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
            found.append([s[only_token(self.llm)].logprob for o in outputs
                          for s in o.outputs[0].logprobs])  # fmt: skip
            self.forget()
        worst = max(abs(a - b) for a, b in zip(*found, strict=True))
        print(f"both sides: log-probabilities within {worst:.1e}", flush=True)
        if worst > TOLERANCE:
            raise SystemExit(f"the sides differ by {worst}: nothing timed")

    # -- the load ------------------------------------------------------------------------------

    def load(self, side: str, num_ordinary: int, seed: int) -> list[dict[str, Any]]:
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


# -- one choreographed call in the batch -----------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Ordinary requests that run beside one small call."""

    title: str
    num_requests: int
    prompt_tokens: int
    is_decode: bool


BATCHES = (
    Batch("8 requests of 100 tokens decode", 8, 100, True),
    Batch("8 requests of 1,000 tokens decode", 8, 1000, True),
    Batch("a prompt of 100 tokens is prefilled", 1, 100, False),
    Batch("a prompt of 1,000 tokens is prefilled", 1, 1000, False),
)


def _kernels(bench: _Bench, number: int, repeats: int) -> list[dict[str, Any]]:
    """Steps of ordinary requests beside one call that reads 512 tokens, or a prefix as long."""
    rows = []
    for batch in BATCHES:
        _seconds_beside(bench, SIDES[1], batch)  # from now on vLLM has cached what decodes
        for repeat in range(repeats):
            for side in SIDES if (number + repeat) % 2 else SIDES[::-1]:
                seconds = _seconds_beside(bench, side, batch)
                row = {"pass": number, "repeat": repeat, "batch": batch.title, "side": side}
                rows.append({**row, "step_s": round(seconds, 6)})
        print(f"pass {number}: {batch.title}: {mixed_page.steps_in_words(rows, batch.title)}",
              flush=True)  # fmt: skip
    return rows


def _seconds_beside(bench: _Bench, side: str, batch: Batch) -> float:
    """Of a decode step of the batch and the call; or from a prompt to its first token."""
    decode_tokens = 16
    ids = [bench.submit_reader(side, range(700, 716), bench.messages[:1], forced(bench.llm, 99))]
    bench.engine.step()
    # A prompt to prefill must be new each time; those that only decode may be cached.
    firsts = [2000 + i if batch.is_decode else bench.new_token() for i in range(batch.num_requests)]
    params = forced(bench.llm, decode_tokens if batch.is_decode else 1)
    start = time.perf_counter()
    for first in firsts:
        ids.append(bench.submit([first, *range(3000, 2999 + batch.prompt_tokens)], params))
    num_open = batch.num_requests
    with StepWatch(bench.llm) as watch:
        while num_open:
            num_open -= sum(output.finished for output in bench.engine.step())
    seconds = time.perf_counter() - start
    bench.engine.abort_request(ids)
    bench.drain()
    bench.forget()
    return median(watch.decode_seconds(len(ids))) if batch.is_decode else seconds


if __name__ == "__main__":
    sys.exit(main())
