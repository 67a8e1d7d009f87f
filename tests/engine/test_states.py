# SPDX-License-Identifier: Apache-2.0
"""Models with states in place of keys: chains against the text, in HuggingFace's own forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.feature_machine import invariants
from tests.engine.hybrid import LITTLE_ROOM, MODELS, scheduler_of, small_engine
from tests.engine.test_exact import Program, _text
from tests.engine.text_oracle import TextOracle
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.cli.inspect import block_map
from vllm_choreo.errors import ChainError, RepairError
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.models.tiny import make_tiny_model


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
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


def _totals(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.store.totals


def _bytes_of_a_state(llm: Any) -> int:
    """Bytes that lie under one number, counted by the tensors themselves."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner
    return sum(tensor[0].nbytes for tensor in runner.states._tensors)


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
        assert stats["num_states_used"] == 4 and stats["num_message_states"] == 3
        num_bytes = _bytes_of_a_state(llm)
        assert stats["state_bytes"] == num_bytes > 0
        assert [m["state_bytes"] for m in stats["messages"]] == [num_bytes] * 3 + [0]
        assert f"  {b.id.rpartition('/')[2]}: 3, " in block_map(stats)
        assert f", and {num_bytes:,} of its state" in block_map(stats)


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


@pytest.mark.parametrize("saved", ["recipes", "states", "evicted"])
def test_saved_messages(llm: Any, oracle: TextOracle, tmp_path: Path, saved: str) -> None:
    """What has its state goes on at once; what has none any more is a recipe."""
    rng = random.Random(7)
    with Choreography(llm) as c:
        a = c.prefill(_tokens(rng, 40), save_as="a")
        b = c.prefill(_tokens(rng, 20), parents=[a], save_as="b")
        if saved == "evicted":
            c.evict(b)
        kept = c.save(["a", "b"], tmp_path / "kept", encodings=saved != "recipes")
    num_encodings = {"recipes": 0, "states": 2, "evicted": 1}[saved]
    assert kept.encodings == num_encodings
    before = _totals(llm).get("encoded_again_messages", 0)
    with Choreography(llm) as c:
        chain = c.load(tmp_path / "kept")
        header = _tokens(rng, 4)
        answer = c.decode(header, parents=chain, sampling_params=_greedy())
        oracle.check([*(t for message in chain for t in message.token_ids), *header], answer)
        assert answer.usage.exact
    assert _totals(llm).get("encoded_again_messages", 0) - before == 2 - num_encodings
    invariants.check_nothing_is_left(llm.llm_engine.engine_core.engine_core.scheduler)


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
    for seed in range(2):
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
        calls: list[dict[str, Any]] = [{"parents": chain} for chain in chains]
        for call in calls:
            if not call["parents"] and self.rng.random() < 0.3:
                call["new_offset"] = 57  # and is read from 0 on: a shift changes nothing
        if self.rng.random() < 0.4:
            made = c.prefill([{"tokens": t, **p} for t, p in zip(tokens, calls, strict=True)])
        else:
            calls = [{"header": t, **p} for t, p in zip(tokens, calls, strict=True)]
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


_SEEDS = [range(5), *(range(first, first + 5) for first in range(5, 100, 5))]


@pytest.fixture(params=sampled([True, False], 1), ids=["async", ""])
def small(
    request: pytest.FixtureRequest,
    name: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
) -> Any:
    """Engine of 24 blocks and 4 states; long prompts run in parts, keys are moved.

    With asynchronous scheduling a step is planned before its first token is known, and an answer
    may have run its last one when it is found to be that.
    """
    is_async = request.param
    choreo = {"tokens_per_state": 160, "reposition": "in_place" if is_async else "query"}
    more = {"max_num_batched_tokens": 48, "scheduling_policy": "priority"} if is_async else {}
    return small_engine(engine_slot, tiny_model_path(name), choreo, is_async=is_async, **more)


def test_preempted_calls_begin_again(small: Any, oracle: TextOracle) -> None:
    rng, scheduler = random.Random(8), scheduler_of(small)
    seen: list[int] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (seen.append(1), preempt(*args, **kwargs))
    with Choreography(small) as c:
        a = c.prefill(_tokens(rng, 64))
        headers = [_tokens(rng, 5) for _ in range(4)]
        calls = [{"header": header, "parents": [a]} for header in headers]
        answers = c.decode(calls, sampling_params=_greedy(220))
        for header, answer in zip(headers, answers, strict=True):
            oracle.check([*a.token_ids, *header], answer)
        more = _tokens(rng, 3)
        last = c.decode(more, parents=[a, answers[0]], sampling_params=_greedy())
        oracle.check([*a.token_ids, *answers[0].token_ids, *more], last)
    del scheduler._preempt_request
    assert seen
    invariants.check_nothing_is_left(scheduler)


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random_trees_with_little_room(small: Any, oracle: TextOracle, seeds: range) -> None:
    """Encodings lose both blocks and states, and states alone."""
    llm = small
    for seed in seeds:
        with Choreography(llm) as c:
            tree = Tree(random.Random(seed))
            for _ in range(6):
                tree.step(c, oracle)
                invariants.check(scheduler_of(llm))
        invariants.check_nothing_is_left(scheduler_of(llm))
    totals = scheduler_of(llm).store.totals
    assert totals["evicted_states"] and totals["encoded_again_messages"]


def test_states_come_back_from_host_memory(
    name: str,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    oracle: TextOracle,
) -> None:
    choreo = {"tokens_per_state": 160, "host_memory_gib": 0.02}
    llm = small_engine(engine_slot, tiny_model_path(name), choreo, is_async=False)
    rng = random.Random(6)
    with Choreography(llm) as c:
        a = c.prefill(_tokens(rng, 40))
        b = c.prefill(_tokens(rng, 50), parents=[a])
        text = [*a.token_ids, *b.token_ids]
        for _ in range(2):
            c.evict(a, b)
            invariants.check(scheduler_of(llm))
            stats = c.stats()
            sizes = stats["block_bytes"], stats["state_bytes"]
            assert [m["state_bytes"] for m in stats["messages"][:2]] == [0, 0]
            assert [m["host_bytes"] for m in stats["messages"][:2]] == [2 * sizes[0] + sizes[1]] * 2
            assert stats["num_host_states_used"] >= 2 and "in host memory" in block_map(stats)
            header = _tokens(rng, 5)
            answer = c.decode(header, parents=[a, b], sampling_params=_greedy())
            oracle.check([*text, *header], answer)
        # Others push the states out of the pool, and blocks with them.
        others = [c.prefill(_tokens(rng, 60)) for _ in range(12)]
        header = _tokens(rng, 5)
        oracle.check([*text, *header], c.decode(header, parents=[a, b], sampling_params=_greedy()))
        oracle.check(
            [*others[0].token_ids, *header],
            c.decode(header, parents=others[:1], sampling_params=_greedy()),
        )
        totals = scheduler_of(llm).store.totals
        assert totals["restored_states"] >= 3
        assert not totals["encoded_again_messages"]
    for seed in range(2):
        with Choreography(llm) as c:
            tree = Tree(random.Random(200 + seed))
            for _ in range(6):
                tree.step(c, oracle)
                invariants.check(scheduler_of(llm))
    invariants.check_nothing_is_left(scheduler_of(llm))


@pytest.mark.exhaustive
def test_a_model_without_positions(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    """Nemotron-H: Mamba2, and attention that knows no positions. Its states can be composed."""
    path = tiny_model_path("nemotron_h")
    choreo = {"composed_states": True, "tokens_per_state": 128}
    llm = engine_slot(path, additional_config={"choreo": choreo})
    oracle = TextOracle(path)
    for seed in range(12):
        with Choreography(llm) as c:
            tree = Tree(random.Random(300 + seed))
            for _ in range(6):
                tree.step(c, oracle)
        invariants.check_nothing_is_left(scheduler_of(llm))


# -- in bfloat16 -------------------------------------------------------------------------------


def _squares(oracle: TextOracle, text: Sequence[int], tokens: Any, logprobs: Any) -> list[float]:
    found = oracle.logprobs([*text, *tokens])[len(text) - 1 :]
    return [
        (entry.logprob - float(row[token])) ** 2
        for row, entries in zip(found, logprobs, strict=False)
        for token, entry in entries.items()
    ]


def _root_mean(squares: Sequence[float]) -> float:
    return float((sum(squares) / len(squares)) ** 0.5)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_small", [False, True], ids=["", "small"])
def test_delta_rule_is_as_near_to_float32_as_ordinary_requests(
    engine_slot: Callable[..., Any], tmp_path: Path, is_small: bool
) -> None:
    """vLLM runs gated delta rules on CPU in bfloat16 alone, so both are judged by one float32.

    Chains are long and branch; in a small pool they lose blocks and states, and states alone.
    """
    path = make_tiny_model("qwen3_next", tmp_path, dtype=torch.bfloat16)
    choreo = {"choreo": {"tokens_per_state": 160}}
    options = {**LITTLE_ROOM, "additional_config": choreo} if is_small else {}
    llm = engine_slot(path, dtype="bfloat16", **options)
    oracle, rng = TextOracle(path), random.Random(0)
    chained: list[float] = []
    ordinary: list[float] = []
    with Choreography(llm) as c:
        chains: list[list[Message]] = []
        for number in range(104):
            # Half of them go on behind an old one, which may have been evicted.
            chain = list(rng.choice(chains)[:-1]) if number % 2 else []
            for length in [rng.choice((1, 7, 31, 33, 64, 90)) for _ in range(1 if chain else 3)]:
                chain.append(c.prefill(_tokens(rng, length), parents=chain))
            chain.append(c.decode(_tokens(rng, 4), parents=chain, sampling_params=_greedy(4)))
            header = _tokens(rng, 3)
            answer = c.decode(header, parents=chain, sampling_params=_greedy())
            text = [*(t for message in chain for t in message.token_ids), *header]
            chained += _squares(oracle, text, answer.generated_token_ids, answer.logprobs)
            (output,) = llm.generate([{"prompt_token_ids": text}], _greedy(), use_tqdm=False)
            said = output.outputs[0]
            ordinary += _squares(oracle, text, said.token_ids, said.logprobs)
            chains.append(chain)
            invariants.check(scheduler_of(llm))
    totals = scheduler_of(llm).store.totals
    assert not is_small or (totals["encoded_again_messages"] and totals["evicted_states"])
    far = _root_mean(chained) / _root_mean(ordinary)
    # Another choice of tokens moves it: of 24 requests each, by as much.
    assert far < 1.15, far
