# SPDX-License-Identifier: Apache-2.0
"""Plans on a real engine: exact ones give what the naive run gives, on six workflows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.byte_model import make_byte_model
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import KeptError
from vllm_choreo.planner import AnswerCache, Msg, Planner, build, invoke, naive, ops
from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.graph import CompiledGraph
from vllm_choreo.planner.logical.op import Op
from vllm_choreo.planner.patterns import (
    debate,
    iterative_refinement,
    map_reduce,
    parallel_chains,
    reflection,
    trading,
)
from vllm_choreo.planner.physical.cost import CostModel, EngineModel
from vllm_choreo.planner.workers.facade import FacadeWorker

GREEDY = {"temperature": 0.0, "max_tokens": 6}
ROLES = ["You are terse, and you always say why you think so.", "You doubt all that you are told."]
TASK = {
    "context": [
        "Anna owns a red bicycle and a green shed.",
        "Ben has two dogs, three cats and a cow.",
    ],
    "question": "What is there?",
}
CHUNKS = {
    "chunk_1": ["It broke after a week.", "Lovely colours."],
    "chunk_2": ["The box was torn.", "Lovely colours, too."],
}
DESK = {
    "ticker": ["AAA", "BBB"],
    "market": ["Prices rose.", "Prices fell."],
    "social": "All talk of it.",
    "news": ["A new factory.", "A strike."],
    "fundamentals": "No debts.",
}
DOCUMENTS = {
    **{
        f"{kind}_{i}": [f"{kind} {i} of A.", f"{kind} {i} of B."]
        for kind, i in [("market", 1), ("market", 2), ("social", 1), ("social", 2), ("social", 3)]
    },
    "news": ["A new factory.", "A strike."],
    "fundamentals": "No debts.",
}


def dialogue() -> CompiledGraph:
    """A completion, a history that grows until it is long, and a while over two states."""
    q = ops.placeholder("context")
    opened = ops.complete(ops.fmt("Two facts. {} And", q), sampling=GREEDY)

    def more(said: Op, last: Op) -> tuple[list[Msg | Op], Op]:
        turn = [said, Msg("user", ops.fmt("Go on from this: {}", last))]
        answer = ops.llm(turn, sampling=GREEDY)
        return [*turn, Msg("assistant", answer)], answer

    begin = ([Msg("system", 3 * ROLES[0]), Msg("user", q)], opened)
    said, last = ops.loop(begin, more, rounds=3, until=lambda said, last: len(said) > 5)
    grown = ops.while_(
        lambda text: len(text) < 12,
        last,
        lambda text: ops.fmt("{}{}", text, ops.complete(text, sampling=GREEDY)),
        rounds=12,
    )
    return build({"said": said, "last": last, "grown": grown}).compile(context=TASK["context"])


def chosen() -> CompiledGraph:
    """Halves of a batch that are asked differently, and one that is asked about both."""
    q = ops.placeholder("context")
    halves = [ops.batch_slice(q, 0, 2), ops.batch_slice(q, 2)]
    answers = [
        ops.llm([Msg("system", role), Msg("user", half)], sampling=GREEDY)
        for role, half in zip(ROLES, halves, strict=True)
    ]
    both = ops.batch_concat(*answers)
    again = ops.llm([Msg("user", ops.fmt("{} Is that so? {}", q, both))], sampling=GREEDY)
    return build({"both": both, "again": again}).compile(
        context=[*TASK["context"], *TASK["context"][::-1]]
    )


def beginnings() -> CompiledGraph:
    """Several questions about each of two contexts, which begin alike themselves."""
    contexts = [10 * "All that is told here is told twice. " + text for text in TASK["context"]]
    asked = ["Who owns it?", "What is there, and who owns it?"]
    task = {
        "context": [context for context in contexts for _ in asked],
        "question": asked * len(contexts),
    }
    return build([map_reduce(ROLES, sampling=GREEDY)]).compile(**task)


WORKFLOWS: dict[str, Callable[[], CompiledGraph]] = {
    "map_reduce": lambda: build([map_reduce(ROLES, sampling=GREEDY)]).compile(**TASK),
    "debate": lambda: build(debate(ROLES, sampling=GREEDY)).compile(**TASK),
    "reflection": lambda: build([reflection(ROLES, sampling=GREEDY)]).compile(**TASK),
    "critics in turn": lambda: build([reflection(ROLES, in_turn=True, sampling=GREEDY)]).compile(
        **TASK
    ),
    "iterative": lambda: build([iterative_refinement(2, sampling=GREEDY)]).compile(**CHUNKS),
    "parallel": lambda: build([parallel_chains(ROLES, 2, sampling=GREEDY)]).compile(**CHUNKS),
    "trading": lambda: build([trading(ROLES, rounds=1, sampling=GREEDY)]).compile(**DESK),
    "documents": lambda: build(
        [trading(ROLES[:1], rounds=2, documents={"market": 2, "social": 3}, sampling=GREEDY)]
    ).compile(ticker=["AAA", "BBB"], **DOCUMENTS),
    "dialogue": dialogue,
    "chosen": chosen,
    "beginnings": beginnings,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def llm(engine_slot: Callable[..., Any], model_path: Path) -> Any:
    return engine_slot(model_path, max_num_batched_tokens=1024)


@pytest.mark.parametrize("name", sampled(WORKFLOWS, 3))
def test_exact_plans_give_what_the_naive_run_gives(llm: Any, name: str) -> None:
    compiled = WORKFLOWS[name]()
    with Choreography(llm, mode="baseline") as c:
        expected = naive(compiled, c)
    for mode in ("baseline", "choreo"):
        with Choreography(llm, mode=mode) as c:
            result = invoke(compiled, c)
            assert list(result) == expected, mode
            assert all(lane.answer.exact for lane in result.stats.lanes)


@pytest.mark.parametrize("dispatch", ["rank", "pending"])
def test_whatever_is_begun_first_the_answers_are_the_same(llm: Any, dispatch: str) -> None:
    """In blocks for a KV cache that holds two prompts, by either choice of what can run."""
    compiled = WORKFLOWS["debate"]()
    cost = CostModel(engine=EngineModel(capacity=300, width=2, step=4, decode=2.5))
    with Choreography(llm, mode="baseline") as c:
        expected = naive(compiled, c)
    with Choreography(llm) as c:
        planner = Planner(c, cost=cost)
        planner.target = replace(planner.target, dispatch=dispatch)
        result = planner.invoke(compiled)
    assert list(result) == expected
    assert all(lane.answer.exact for lane in result.stats.lanes)


def test_a_chat_that_goes_on_encodes_its_new_turn_alone(llm: Any) -> None:
    """Where the text has the tokens that were generated: the model may write letters alone."""
    letters = llm.get_tokenizer().convert_tokens_to_ids([*map(chr, range(33, 127))])
    role = 3 * ROLES[0]  # what is short is not worth a message of its own
    said, answers = [Msg("system", role)], []
    for text in (ops.placeholder("q"), "Are you sure?", "Really?"):
        said.append(Msg("user", text))
        answers.append(ops.llm(said, sampling={**GREEDY, "allowed_token_ids": letters}))
        said.append(Msg("assistant", answers[-1]))
    compiled = build(answers).compile(q=TASK["context"])
    with Choreography(llm, mode="baseline") as c:
        expected = naive(compiled, c)
    with Choreography(llm) as c:
        result = invoke(compiled, c)
        assert list(result) == expected
        answered = {lane.task: lane.answer for lane in result.stats.lanes}
        others = set(result.plan.goes_on.values())
        assert len(result.plan.goes_on) == 4
        for call, earlier in result.plan.goes_on.items():
            before = answered[earlier]
            assert answered[call].reused >= before.num_prompt + before.num_out
            assert answered[call].exact
        # All that is given is encoded once, and nothing that was generated.
        last = [answer for call, answer in answered.items() if call not in others]
        given = sum(answer.num_prompt - 2 * answer.num_out for answer in last)
        shared = len(c.tokenize(f"<|im_start|>system\n{role}<|im_end|>\n"))
        assert result.stats.num_encoded == given - shared
        assert c.stats()["num_messages"] <= len(result.plan.cuts.static)


@pytest.mark.parametrize("name", sampled(["debate", "reflection", "trading"], 1))
def test_choreographed_plans_read_answers_where_they_lie(llm: Any, name: str) -> None:
    compiled = WORKFLOWS[name]()
    with Choreography(llm, mode="choreo") as c:
        exact = invoke(compiled, c)
    with Choreography(llm, mode="choreo") as c:
        planner = Planner(c, semantics="choreo")
        for operator in compiled.graph.nodes:
            if operator.kind == "llm":  # as if answers were long: to read them pays
                planner.profile.add(operator.name, 100.0)
        result = planner.invoke(compiled)
        assert not result.errors
        assert "message" in {choice.how for choice in result.plan.choices.values()}
        assert not all(lane.answer.exact for lane in result.stats.lanes)
        # What calls read is the same text, but less of it is encoded.
        encoded = [
            sum(lane.answer.num_prompt - lane.answer.reused for lane in run.stats.lanes)
            for run in (exact, result)
        ]
        assert encoded[1] < encoded[0]
        kept = c.stats()["num_messages"]
    assert kept <= len(result.plan.cuts.static)


@pytest.mark.parametrize("name", sampled(["debate", "trading"], 1))
def test_answers_are_moved_to_where_they_are_read(llm: Any, name: str) -> None:
    """Two workers say what one says, for both read the same keys and values."""
    compiled, said = WORKFLOWS[name](), []
    for num_workers in (1, 2):
        with ExitStack() as stack:
            sessions = [stack.enter_context(Choreography(llm)) for _ in range(num_workers)]
            workers = [FacadeWorker(c) for c in sessions]
            for worker in workers:
                worker.min_moved_tokens = 1
            planner = Planner(workers, semantics="choreo")
            for operator in compiled.graph.nodes:
                if operator.kind == "llm":
                    planner.profile.add(operator.name, 100.0)
            result = planner.invoke(compiled)
            said.append(list(result))
            assert len({lane.worker for lane in result.stats.lanes}) == num_workers
            assert bool(result.stats.num_moved) == (num_workers > 1)
            for c in sessions:
                assert c.stats()["num_messages"] <= len(result.plan.cuts.static)
    assert said[0] == said[1]


def test_static_beginnings_outlive_their_session(llm: Any, tmp_path: Path) -> None:
    roles = [4 * role for role in ROLES]  # what is short is not worth a message of its own
    compiled, folder = build(debate(roles, sampling=GREEDY)).compile(**TASK), tmp_path / "kept"
    ran = []
    for _ in range(3):
        with Choreography(llm) as c:
            planner = Planner(c, kept=folder)
            ran += [planner.invoke(compiled), planner.invoke(compiled)]
            pinned = c.stats()["num_messages"]
            assert pinned == len(ran[0].plan.cuts.static)
        assert [*folder.glob("manifest.json")]
    assert all(list(result) == list(ran[0]) for result in ran)
    first, *others = (result.stats for result in ran)
    assert {run.num_encoded for run in others} == {others[0].num_encoded}
    assert first.num_encoded > others[0].num_encoded, "what was kept is not encoded"
    (file, *_) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with Choreography(llm) as c, pytest.raises(KeptError) as error:
        Planner(c, kept=folder).invoke(compiled)
    assert file.name in str(error.value.value)


def test_what_others_have_kept_is_left_alone(llm: Any, tmp_path: Path) -> None:
    compiled, folder = WORKFLOWS["debate"](), tmp_path / "library"
    with Choreography(llm) as c:
        first = c.prefill("The shed is green.")
        c.save([c.prefill("It is old.", parents=[first])], folder)
    kept = (folder / "manifest.json").read_bytes()
    with Choreography(llm) as c:
        with pytest.raises(GraphError, match="a folder of its own"):
            Planner(c, kept=folder).invoke(compiled)
        assert c.stats()["num_messages"] == 0
        assert (folder / "manifest.json").read_bytes() == kept


def test_a_storage_that_fails_loses_no_result(llm: Any, tmp_path: Path) -> None:
    compiled, file = WORKFLOWS["debate"](), tmp_path / "file"
    with Choreography(llm) as c:
        expected = list(invoke(compiled, c))
        planner = Planner(c, kept=file)
        result = planner.invoke(compiled, on_result=lambda *_: file.write_text("no folder"))
        assert list(result) == expected and file.is_file()


def test_the_second_day_fetches_what_has_not_changed(llm: Any) -> None:
    graph = build([trading(ROLES, rounds=1, sampling=GREEDY)])
    with Choreography(llm, mode="choreo") as c:
        planner = Planner(c, cache=AnswerCache())
        planner.invoke(graph.compile(**DESK))
        second = graph.compile(**{**DESK, "market": ["Prices rose.", "Prices fell again."]})
        result = planner.invoke(second)
        fetched = result.plan.num_fetched
        assert fetched > 0 and result.stats.num_calls < len(result.plan.tasks)
    with Choreography(llm, mode="baseline") as c:
        assert list(result) == naive(second, c)


def test_one_refused_query_leaves_the_others(llm: Any) -> None:
    long = {**TASK, "context": ["short", "much too long " * 400]}
    compiled = build([map_reduce(ROLES, sampling=GREEDY)]).compile(**long)
    with Choreography(llm, mode="choreo") as c:
        result = invoke(compiled, c)
    assert set(result.errors) == {1} and result[0]
    assert "TooLongError" in str(result.errors[1])
