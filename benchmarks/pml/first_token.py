# SPDX-License-Identifier: Apache-2.0
"""Seconds to the first token of prompts over a long document, on one engine.

text        the prompts as text over vLLM's prefix caching: each begins with an instruction of
            its own, so nothing of the document is a hit
same text   the same after one instruction: the document is a hit
cached      prompts from a schema whose modules are encoded
from host   the same, the document's keys and values in host memory
first       the first prompt of a schema: its modules are encoded for it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.engine import empty_caches, forced
from benchmarks.harness.stats import median
from benchmarks.harness.texts import long_text
from benchmarks.harness.turns import in_turn
from benchmarks.pml.texts import NUM_ROLES, QUESTION, long_prompt, long_schema, role
from vllm_choreo.lab.problems import Problem

SIDES = ("text", "same text", "cached", "from host", "first")
HOST_GIB = 1.0
NAME = "long"
_ROOM = 16  # tokens that a text may gain when it is made of tokens and read again


class Documents:
    """One engine, one document, and its schema in a session that choreographs."""

    def __init__(self, llm: Any, num_tokens: int, texts: Sequence[str] = ()) -> None:
        from vllm_choreo import Choreography
        from vllm_choreo.pml import PromptCache

        self.llm, self.num_tokens = llm, num_tokens
        self.tokenizer = llm.get_tokenizer()
        self._texts = itertools.cycle(texts)
        self._given = len(texts)
        self._seeds = itertools.count(1)
        self.document = self._text()
        self._roles = itertools.cycle(range(NUM_ROLES))
        self.choreo = Choreography(llm)
        self.plain = Choreography(llm, mode="baseline")
        self.cache = PromptCache(self.choreo, self.tokenizer)
        self.cache.register(long_schema(NAME, self.document), encode=True)
        self.one_token = forced(llm, 1)

    def _text(self) -> str:
        """A document that was not read before: a generated one, or the next of those given."""
        seed = next(self._seeds)
        if not self._given:
            return long_text(self.tokenizer, self.num_tokens, seed)
        return f"Collection {seed}. {next(self._texts)}"

    def close(self) -> None:
        self.choreo.close()
        self.plain.close()

    def check_outputs(self) -> None:
        """Raises SystemExit: in exact mode a prompt does not say what its text says."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        prompt = long_prompt(NAME, 0)
        ours = self.cache.decode(prompt, mode="exact", sampling_params=greedy).message
        theirs = self._as_text([0], greedy)[0]
        if ours.generated_token_ids != theirs.generated_token_ids:
            raise SystemExit("a prompt in exact mode and its text differ: nothing timed")
        print("a prompt in exact mode = its text: same greedy tokens", flush=True)
        self.choreo.free(ours)

    # -- what is timed -----------------------------------------------------------------------

    def first_tokens(self, side: str, in_flight: int) -> list[float]:
        """Seconds from submission to each first token; what is not a prompt's is done before."""
        roles = [next(self._roles) for _ in range(in_flight)]
        run: dict[str, Callable[[list[int]], list[float]]] = {
            "text": self._text_times,
            "same text": self._same_text_times,
            "cached": self._cached_times,
            "from host": self._host_times,
            "first": self._first_times,
        }
        return run[side](roles)

    def _as_text(self, roles: list[int], params: Any) -> list[Any]:
        """The prompts as text, tokenised in the same pieces."""
        document = self.plain.prefill(self.document)
        read = self.plain.prefill([{"tokens": role(number)} for number in roles])
        calls = [{"header": QUESTION, "parents": [one, document]} for one in read]
        answers: list[Any] = self.plain.decode(calls, sampling_params=params)
        self.plain.free(document, *read, *answers)
        return answers

    def _text_times(self, roles: list[int]) -> list[float]:
        self._empty()
        return [answer.metrics.ttft for answer in self._as_text(roles, self.one_token)]

    def _same_text_times(self, roles: list[int]) -> list[float]:
        self._empty()
        self._as_text(roles[:1], self.one_token)
        answers = self._as_text([roles[0]] * len(roles), self.one_token)
        return [answer.metrics.ttft for answer in answers]

    def _empty(self) -> None:
        """Text has no help of earlier turns. Messages are encoded again when they are read."""
        empty_caches(self.llm)

    def _cached_times(self, roles: list[int]) -> list[float]:
        self._answers(roles)  # so that all is resident
        return self._answers(roles)

    def _host_times(self, roles: list[int]) -> list[float]:
        self._answers(roles)
        self.cache.evict(NAME)
        return self._answers(roles)

    def _first_times(self, roles: list[int]) -> list[float]:
        """The encoding of the modules counts for each of the prompts: all wait for it."""
        import time

        from vllm_choreo.pml import PromptCache

        cache = PromptCache(self.choreo, self.tokenizer)
        cache.register(long_schema("fresh", self._text()))
        began = time.perf_counter()
        prompts = [long_prompt("fresh", number) for number in roles]
        answers = cache.decode(prompts, sampling_params=self.one_token)
        times = [a.message.metrics.submitted - began + a.message.metrics.ttft for a in answers]
        self.choreo.free(*(answer.message for answer in answers))
        cache.unregister("fresh")
        return times

    def _answers(self, roles: list[int]) -> list[float]:
        prompts = [long_prompt(NAME, number) for number in roles]
        answers = self.cache.decode(prompts, sampling_params=self.one_token)
        self.choreo.free(*(answer.message for answer in answers))
        return [answer.message.metrics.ttft for answer in answers]


def real_texts(tokenizer: Any, problems: Sequence[Problem], num_tokens: int) -> list[str]:
    """Documents of problems, one after the other, in texts of up to `num_tokens` tokens each.

    Raises:
        SystemExit: all documents together do not make one text of half as many.
    """
    made: list[str] = []
    ids: list[int] = []
    for problem in problems:
        for document in problem.documents:
            ids += tokenizer.encode(document + "\n\n", add_special_tokens=False)
            while len(ids) >= num_tokens:
                made.append(tokenizer.decode(ids[: num_tokens - _ROOM]))
                ids = ids[num_tokens:]
    if not made and len(ids) < num_tokens // 2:
        raise SystemExit(f"the documents have {len(ids)} tokens, and {num_tokens} are needed")
    return made or [tokenizer.decode(ids)]


def measure(
    llm: Any, num_tokens: int, in_flight: list[int], turns: int, texts: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One row for each turn, side and number of prompts in flight.

    Args:
        texts: documents to be read; none: they are generated.
        turns: with one prompt in flight; with `n` every turn has `n` times, and there are fewer.
    """
    documents = Documents(llm, num_tokens, texts)
    documents.check_outputs()
    rows = []
    for count in in_flight:
        for turn in range(max(1, turns // count)):
            for side in in_turn(SIDES, turn):
                times = documents.first_tokens(side, count)
                rows.append(
                    {
                        "document_tokens": num_tokens,
                        "in_flight": count,
                        "turn": turn,
                        "side": side,
                        "median_s": round(median(times), 5),
                        "last_s": round(max(times), 5),
                    }
                )
                print(rows[-1], flush=True)
    documents.close()
    return rows
