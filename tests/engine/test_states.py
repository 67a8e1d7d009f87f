# SPDX-License-Identifier: Apache-2.0
"""Models with states in place of keys: chains against the text, in HuggingFace's own forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.feature_machine import invariants
from tests.engine.feature_machine.configurations import Configuration, scheduling_of
from tests.engine.oracle import private_model_class
from tests.engine.test_exact import Program, _text
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import ChainError, RepairError
from vllm_choreo.semantics.message import Message

MODELS = ["granite_hybrid"]


class TextOracle:
    """Log-probabilities of a text by a dense pass of a HuggingFace model in float32."""

    def __init__(self, model_path: Path) -> None:
        model = private_model_class(model_path).from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.eval()

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 `[len(token_ids), vocab_size]`; row i predicts the token after token i."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)

    def check(self, text: Sequence[int], message: Message) -> float:
        """Check a generated message behind `text`, its header included; returns the error."""
        found = self.logprobs([*text, *message.generated_token_ids])[len(text) - 1 :]
        error = 0.0
        for row, token, logprobs in zip(
            found, message.generated_token_ids, message.logprobs, strict=False
        ):
            assert float(row[token]) > float(row.max()) - TIE_MARGIN
            differences = (abs(entry.logprob - float(row[t])) for t, entry in logprobs.items())
            error = max(error, *differences)
        assert error < LOGPROB_TOLERANCE
        return error


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def llm(name: str, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path(name))


@pytest.fixture(scope="module")
def oracle(name: str, tiny_model_path: Callable[[str], Path]) -> TextOracle:
    return TextOracle(tiny_model_path(name))


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


def _greedy(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=3, **options
    )


def _tokens(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 511) for _ in range(num_tokens)]


def test_chain_and_branches(c: Choreography, oracle: TextOracle) -> None:
    rng = random.Random(1)
    a = c.prefill(_tokens(rng, 40))
    b = c.prefill(_tokens(rng, 33), parents=[a])
    header = _tokens(rng, 5)
    answer = c.decode(header, parents=[a, b], sampling_params=_greedy())
    oracle.check([*a.token_ids, *b.token_ids, *header], answer)
    assert answer.usage.exact and answer.usage.reused_tokens == 73
    # Branches begin with one state, the last sampled token's included, and none changes it.
    headers = [_tokens(rng, n) for n in (1, 7, 40)]
    parents = [a, b, answer]
    calls = [{"header": h, "parents": parents} for h in headers]
    text = [t for m in parents for t in m.token_ids]
    for _ in range(2):
        for h, branch in zip(headers, c.decode(calls, sampling_params=_greedy()), strict=True):
            oracle.check([*text, *h], branch)
            assert branch.usage.encoded_tokens == len(h) + 6
    alone = c.decode(headers[1], parents=[a], sampling_params=_greedy())
    oracle.check([*a.token_ids, *headers[1]], alone)


def test_another_session_shares_a_whole_message(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(4)
    tokens, header = _tokens(rng, 70), _tokens(rng, 5)
    with Choreography(llm) as first, Choreography(llm) as second:
        a = first.prefill(tokens)
        said = first.decode(header, parents=[a], sampling_params=_greedy())
        b = second.prefill(tokens)
        assert b.usage.encoded_tokens == 0
        again = second.prefill(said.token_ids, parents=[b])
        assert again.usage.encoded_tokens == 0
        answer = second.decode(header, parents=[b, again], sampling_params=_greedy())
        oracle.check([*tokens, *said.token_ids, *header], answer)
        first.free(a, said)
        oracle.check(
            [*tokens, *said.token_ids, *header],
            second.decode(header, parents=[b, again], sampling_params=_greedy()),
        )
        stats = second.stats()
        # The last answer's last token has yet to run.
        assert [m["has_state"] for m in stats["messages"]] == [True, True, True, False]
        assert stats["num_states_used"] == 4


def test_an_answer_cut_by_its_client(c: Choreography, oracle: TextOracle) -> None:
    """A stop string is found some tokens later; nothing begins with a state that is beyond it."""
    rng = random.Random(5)
    a, header = c.prefill(_tokens(rng, 40)), _tokens(rng, 5)
    whole = c.decode(header, parents=[a], sampling_params=_greedy(12))
    word = f"t{whole.generated_token_ids[5]}"
    cut = c.decode(header, parents=[a], sampling_params=_greedy(12, stop=[word]))
    assert len(cut.generated_token_ids) <= 6
    more = _tokens(rng, 3)
    answer = c.decode(more, parents=[a, cut], sampling_params=_greedy())
    oracle.check([*a.token_ids, *cut.token_ids, *more], answer)


def test_other_orders_are_refused_by_name(c: Choreography) -> None:
    rng = random.Random(2)
    a, b = c.prefill(_tokens(rng, 40)), c.prefill(_tokens(rng, 33))
    with pytest.raises(ChainError, match=r"parent 2 does not continue.*mode='exact'") as error:
        c.decode(_tokens(rng, 5), parents=[a, b], sampling_params=_greedy())
    assert error.value.value == b.id
    with pytest.raises(ChainError, match="only a part of it is named"):
        c.prefill(_tokens(rng, 5), parents=[(a, 0, 7)])
    with pytest.raises(ChainError, match="a gap or an overlap"):
        c.prefill(_tokens(rng, 5), parents=[a], new_offset=50)
    with pytest.raises(RepairError, match="keeps a state"):
        c.prefill(_tokens(rng, 5), parents=[a], repair="first:8")


def test_random_programs_in_exact_mode(llm: Any, oracle: TextOracle) -> None:
    for seed in range(4):
        with Choreography(llm, mode="exact") as c:
            program = Program(random.Random(seed), ("exact",))
            for _ in range(6):
                program.step(c)
            assert all(message.usage.exact for message in program.made)
            for call, answer in zip(program.calls, program.answers, strict=True):
                oracle.check(_text(call), answer)


def test_ordinary_requests(llm: Any, oracle: TextOracle) -> None:
    rng = random.Random(3)
    texts = [_tokens(rng, n) for n in (1, 300, 40, 40, 2)]
    texts[3] = list(texts[2])
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": t} for t in texts], _greedy(), use_tqdm=False)
        for text, output in zip(texts, outputs, strict=True):
            (completion,) = output.outputs
            found = oracle.logprobs([*text, *completion.token_ids])[len(text) - 1 :]
            for row, token, entries in zip(
                found, completion.token_ids, completion.logprobs, strict=False
            ):
                assert float(row[token]) > float(row.max()) - TIE_MARGIN
                for t, entry in entries.items():
                    assert abs(entry.logprob - float(row[t])) < LOGPROB_TOLERANCE


# -- little room -------------------------------------------------------------------------------


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@dataclass
class Tree:
    """A random tree of chains in choreo mode: every call goes on behind a node, and is checked."""

    rng: random.Random
    nodes: list[list[Message]] = field(default_factory=list)  # the chain of each, itself included

    def step(self, c: Choreography, oracle: TextOracle) -> None:
        chains = [
            self.rng.choice([[], *self.nodes, *self.nodes[-3:]])
            for _ in range(self.rng.choice((1, 1, 2, 4)))
        ]
        tokens = [_tokens(self.rng, self.rng.choice((1, 3, 20, 32, 33, 50))) for _ in chains]
        if self.rng.random() < 0.4:
            calls = [{"tokens": t, "parents": p} for t, p in zip(tokens, chains, strict=True)]
            made = c.prefill(calls)
        else:
            calls = [{"header": t, "parents": p} for t, p in zip(tokens, chains, strict=True)]
            # Ends that are not foreseen: with asynchronous scheduling their last token has run.
            stop = self.rng.sample(range(3, 511), 60) if self.rng.random() < 0.5 else None
            params = _greedy(self.rng.randrange(1, 12), stop_token_ids=stop)
            made = c.decode(calls, sampling_params=params)
            for header, chain, answer in zip(tokens, chains, made, strict=True):
                text = [t for message in chain for t in message.token_ids]
                assert answer.usage.exact
                oracle.check([*text, *header], answer)
        self.nodes += [[*chain, message] for chain, message in zip(chains, made, strict=True)]
        if self.rng.random() < 0.3:
            c.evict(*self.rng.choice(self.nodes))


_SEEDS = [range(first, first + 10) for first in range(0, 100, 10)]
_ASYNC = Configuration("", frozenset({"async"}), 25)


@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_trees_with_little_room(
    name: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    oracle: TextOracle,
    is_async: bool,
    seeds: range,
) -> None:
    """24 blocks and 5 states: encodings lose both, and states alone; long prompts run in parts.

    With asynchronous scheduling a step is planned before its first token is known, and an answer
    may have run its last one when it is found to be that.
    """
    room = {
        "num_gpu_blocks_override": 25,
        "max_model_len": 24 * 32,
        "additional_config": {"choreo": {"tokens_per_state": 160}},
    }
    parts = {"max_num_batched_tokens": 48, "scheduling_policy": "priority"}
    with scheduling_of(_ASYNC) if is_async else nullcontext():
        llm = engine_slot(tiny_model_path(name), **room, **(parts if is_async else {}))
    assert _scheduler(llm).scheduler_config.async_scheduling == is_async
    for seed in seeds:
        with Choreography(llm) as c:
            tree = Tree(random.Random(seed))
            for _ in range(6):
                tree.step(c, oracle)
                invariants.check(_scheduler(llm))
        invariants.check_nothing_is_left(_scheduler(llm))
    totals = _scheduler(llm).store.totals
    assert totals["evicted_states"] and totals["encoded_again_messages"]
