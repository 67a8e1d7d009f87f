# SPDX-License-Identifier: Apache-2.0
"""The workflows on a real engine, in every mode, and replays of them in every other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.chat.chat_templates import FAMILIES, tokenizer_of
from tests.engine.byte_model import make_byte_model
from vllm_choreo import Choreography
from vllm_choreo.chat.turns import turns_of_tokenizer
from vllm_choreo.errors import OffsetError
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.lab.workflows.branch_solve_merge import branch_solve_merge
from vllm_choreo.lab.workflows.code_review import code_review
from vllm_choreo.lab.workflows.direct import direct
from vllm_choreo.lab.workflows.function_calls import function_calls
from vllm_choreo.lab.workflows.iterative_debate import iterative_debate
from vllm_choreo.lab.workflows.multi_qa import multi_qa
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.prisoners_dilemma import prisoners_dilemma
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Transcript

MODES = ("choreo", "exact", "baseline")
LIKE_TEXT = ("exact", "baseline")
ROLES = ["Be brief.", "Be exact."]
QUESTIONS = ["Who came first?", "What is seven times eight?"]
# Its description alone, byte by byte, would fill the context.
SCENARIO = {"id": "0", "involved_classes": [], "initial_config": {}}
CONCEPTS = ["dog", "tree", "run"]
# Float32 sums in another order: measured differences stay below 1e-4.
LOGPROB_TOLERANCE = 1e-3

LLAMA3 = turns_of_tokenizer(tokenizer_of("llama3"))

Workflow = Callable[[Any, SamplingParams], Transcript]
WORKFLOWS: dict[str, Workflow] = {
    "direct": lambda c, p: direct(c, QUESTIONS[0], sampling_params=p),
    "tree_of_thoughts": lambda c, p: tree_of_thoughts(
        c, QUESTIONS[0], candidates=3, voters=2, sampling_params=p
    ),
    "tree_of_thoughts, roles": lambda c, p: tree_of_thoughts(
        c, QUESTIONS[0], candidates=2, voters=ROLES, sampling_params=p
    ),
    "parallel_debate": lambda c, p: parallel_debate(
        c, QUESTIONS[0], agents=ROLES, rounds=2, sampling_params=p
    ),
    "iterative_debate": lambda c, p: iterative_debate(c, QUESTIONS[0], rounds=2, sampling_params=p),
    **{
        f"multi_qa, {v}": lambda c, p, v=v: multi_qa(c, QUESTIONS, variant=v, sampling_params=p)  # type: ignore[misc]
        for v in ("baseline", "serial", "parallel")
    },
    **{
        f"branch_solve_merge, {v}": lambda c, p, v=v: branch_solve_merge(  # type: ignore[misc]
            c, CONCEPTS, variant=v, sampling_params=p
        )
        for v in ("baseline", "serial", "parallel")
    },
    **{
        f"prisoners_dilemma, {leak}": lambda c, p, leak=leak: prisoners_dilemma(  # type: ignore[misc]
            c, leak=leak, rounds=1, sampling_params=p
        )
        for leak in ("both", "none")
    },
    "code_review": lambda c, p: code_review(c, QUESTIONS[1], sampling_params=p),
    "function_calls": lambda c, p: function_calls(c, QUESTIONS, SCENARIO, sampling_params=p),
    "prisoners_dilemma, predicted": lambda c, p: prisoners_dilemma(
        c, leak="plan", first="Bob", predict=True, rounds=1, sampling_params=p
    ),
    # Plans of a game before; all else of this one is free.
    "prisoners_dilemma, same plans": lambda c, p: prisoners_dilemma(
        c, leak="plan", plans=[[40, 41, 42], [50, 51]], rounds=1, sampling_params=p
    ),
    "tree_of_thoughts, paper": lambda c, p: tree_of_thoughts(
        c, QUESTIONS[0], candidates=2, voters=2, layout="paper", sampling_params=p
    ),
    "iterative_debate, paper": lambda c, p: iterative_debate(
        c, QUESTIONS[0], rounds=2, layout="paper", sampling_params=p
    ),
    "parallel_debate, paper": lambda c, p: parallel_debate(
        c, QUESTIONS[0], agents=ROLES, rounds=2, layout="paper", sampling_params=p
    ),
    "branch_solve_merge, paper": lambda c, p: branch_solve_merge(
        c, CONCEPTS, layout="paper", sampling_params=p
    ),
    # The model's own turns, behind a token that begins every text.
    "multi_qa, paper, parallel": lambda c, p: multi_qa(
        c, QUESTIONS, variant="parallel", layout="paper", turns=LLAMA3, sampling_params=p
    ),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads text byte by byte, so that different words are different tokens."""
    return make_byte_model(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def llm(engine_slot: Callable[..., Any], model_path: Path) -> Any:
    return engine_slot(
        model_path,
        logits_processors=("vllm_choreo.engine.worker.forced:ForcedTokens",),
        # vLLM's CPU runner ends at a seeded request whose prompt takes more than one step.
        max_num_batched_tokens=4096,
    )


def sampling(**options: Any) -> SamplingParams:
    """Sampling that may end early, so that answers differ in length."""
    return SamplingParams(temperature=1.0, seed=5, max_tokens=7, logprobs=0, **options)


def run(llm: Any, mode: str, workflow: Workflow, recorded: Transcript | None = None) -> Transcript:
    with Choreography(llm, mode=mode) as c:
        if recorded is None:
            return workflow(c, sampling())
        with Replay(c, recorded) as replay:
            return workflow(replay, sampling())


def tokens(log: Transcript) -> list[tuple[int, ...]]:
    return [step.message.token_ids for step in log.steps]


def logprobs_of(message: Message) -> list[float]:
    return [
        entry[token].logprob
        for entry, token in zip(message.logprobs, message.generated_token_ids, strict=True)
    ]


def logprobs(log: Transcript) -> list[float]:
    """Those of all tokens that were generated."""
    return [logprob for step in log.decodes() for logprob in logprobs_of(step.message)]


def modes_of(name: str) -> tuple[str, ...]:
    """In exact mode all is text, and no two texts lie in one place."""
    return tuple(
        mode for mode in MODES if (mode, name.rpartition(", ")[2]) != ("exact", "parallel")
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode) if mode == "choreo" else pytest.param(name, mode, marks=pytest.mark.exhaustive)
        for name in WORKFLOWS
        for mode in modes_of(name)
    ],
)
def test_a_workflow_runs_and_its_record_is_replayed(
    llm: Any, name: str, mode: str, tmp_path: Path
) -> None:
    workflow = WORKFLOWS[name]
    log = run(llm, mode, workflow)
    assert log.workflow == name.partition(",")[0] and log.mode == mode
    assert log.answers and log.decodes()
    if mode in LIKE_TEXT:
        assert all(step.message.usage.exact for step in log.steps)

    log.save(tmp_path / "run.json")
    loaded = Transcript.load(tmp_path / "run.json")
    for other in modes_of(name):
        again = run(llm, other, workflow, loaded)
        assert again.mode == other
        assert tokens(again) == tokens(log)
        assert again.answers == log.answers
        if other == mode or {mode, other} == set(LIKE_TEXT):
            assert logprobs(again) == pytest.approx(logprobs(log), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("direct", True),
        ("multi_qa, baseline", True),
        ("multi_qa, serial", False),
        ("multi_qa, parallel", False),
        ("branch_solve_merge, baseline", True),
        ("branch_solve_merge, serial", False),
        ("branch_solve_merge, parallel", False),
    ],
)
def test_the_variant_baseline_is_plain_text_and_the_others_are_not(
    llm: Any, name: str, is_exact: bool
) -> None:
    """Its answer has the logprobs that the same tokens have as text."""
    log = run(llm, "choreo", WORKFLOWS[name])
    text = run(llm, "baseline", WORKFLOWS[name], log)
    assert log.steps[-1].message.usage.exact is is_exact
    same = logprobs(log) == pytest.approx(logprobs(text), abs=LOGPROB_TOLERANCE)
    assert same is is_exact


@pytest.mark.parametrize("name", ["multi_qa, parallel", "branch_solve_merge, parallel"])
def test_messages_in_one_place_are_no_text(llm: Any, name: str) -> None:
    with pytest.raises(OffsetError, match="in exact mode"):
        run(llm, "exact", WORKFLOWS[name])


def test_parallel_questions_are_read_at_one_place(llm: Any) -> None:
    first, second, answer = (
        step.message for step in run(llm, "choreo", WORKFLOWS["multi_qa, parallel"]).steps
    )
    assert first.position == second.position == 0
    assert answer.position == max(first.num_tokens, second.num_tokens)
    assert answer.usage.repositioned_tokens == 0


def test_what_lies_behind_the_start_is_placed_from_its_end_on(llm: Any) -> None:
    log = run(llm, "choreo", WORKFLOWS["multi_qa, paper, parallel"])
    start, system, first, second, answer = (step.message for step in log.steps)
    assert (start.text, start.position) == ("<|begin_of_text|>", 0)
    assert system.position == start.num_tokens
    assert first.position == second.position == start.num_tokens + system.num_tokens
    longest = max(first.num_tokens, second.num_tokens)
    assert answer.position == first.position + longest
    assert [span.id for span in answer.parents] == [start.id, system.id, first.id, second.id]
    assert answer.usage.repositioned_tokens == 0, "the start is encoded once, and seen by all"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["choreo", "baseline"])
def test_a_question_in_a_models_own_turns_is_a_chat_of_the_model(
    llm: Any, family: str, mode: str
) -> None:
    """The oracle is an ordinary request on what the tokenizer's template writes."""
    tokenizer = tokenizer_of(family)
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    turns = turns_of_tokenizer(tokenizer)
    # A system turn that a template adds of its own accord is not the question's.
    text = turns.start + text[text.index(turns.user_opening) :]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    (plain,) = llm.generate([text], params, use_tqdm=False)
    with Choreography(llm, mode=mode) as c:
        log = direct(c, QUESTIONS[0], sampling_params=params, turns=turns)
    answer = log.steps[-1].message
    assert answer.generated_token_ids == tuple(plain.outputs[0].token_ids)
    assert answer.usage.exact
    given = [token for step in log.steps for token in step.message.token_ids]
    assert given == [*plain.prompt_token_ids, *plain.outputs[0].token_ids]


class Rehearsal(Replay):
    """A replay that lets the program encode utterances again, which the record did not."""

    def prefill(self, tokens: Any, **arguments: Any) -> Any:
        if isinstance(tokens, tuple):
            return self._c.prefill(tokens, **arguments)
        return super().prefill(tokens, **arguments)


def test_what_an_utterance_carries_changes_what_the_other_one_says(llm: Any) -> None:
    """One game, token by token: Bob hears Alice with, and without, her plan in her words."""
    both = run(llm, "choreo", WORKFLOWS["prisoners_dilemma, both"])
    with Choreography(llm) as c:
        none = WORKFLOWS["prisoners_dilemma, none"](Rehearsal(c, both), sampling())
    replies = [
        next(s.message for s in log.steps if (s.stage, s.author) == ("round 1", "Bob"))
        for log in (both, none)
    ]
    assert replies[0].token_ids == replies[1].token_ids
    told, kept = (logprobs_of(reply) for reply in replies)
    assert told != pytest.approx(kept, abs=10 * LOGPROB_TOLERANCE)
