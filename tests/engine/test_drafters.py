# SPDX-License-Identifier: Apache-2.0
"""Drafters with layers: they draft for calls, by the spans that these read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm import SamplingParams

from tests.engine.choreographies import check, draw_choreography
from tests.engine.eagle_head import make_eagle_head
from tests.engine.engines import start_engine, stop_engine
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens, whole
from tests.engine.suffix_cache import installed
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.speculation import check_speculation
from vllm_choreo.errors import UnsupportedOptionError

NUM_DRAFTED = 3


class Subject(NamedTuple):
    llm: Any
    oracle: Oracle
    is_right: bool


_MOVED = {"reposition": "in_place", "host_memory_gib": 0.01}
# Model, method, settings.
_SUBJECTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "draft_model", {}),
    "eagle": ("llama", "eagle", {}),
    "ministral3": ("ministral3", "draft_model", {}),
    "moved": ("llama", "draft_model", _MOVED),
}


# A model that drafts for itself is always right: a draft that is not shows a drafter that has read
# or written at wrong places. An EAGLE head reads hidden states of the model, and is hardly ever.
@pytest.fixture(scope="module", params=sampled(list(_SUBJECTS), 2))
def subject(
    request: pytest.FixtureRequest,
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    name, method, choreo = _SUBJECTS[request.param]
    path = drafter = tiny_model_path(name)
    if method == "eagle":
        drafter = make_eagle_head(path, tmp_path_factory.mktemp("heads") / "head")
    speculation = {
        "method": method,
        "model": str(drafter),
        "num_speculative_tokens": NUM_DRAFTED,
    }
    # No prompt is cut: its second part may leave a step no tokens for the drafts of others.
    options: dict[str, Any] = {"num_gpu_blocks_override": 66, "max_num_batched_tokens": 2048}
    options["additional_config"] = {"choreo": choreo}
    llm = start_engine(path, speculative_config=speculation, disable_log_stats=False, **options)
    yield Subject(llm, tiny_oracle(name), is_right=method == "draft_model")
    stop_engine(llm)


def _num_drafted(llm: Any) -> tuple[int, int]:
    """Drafted tokens, and those of them that were right, since the engine started."""
    names = [f"vllm:spec_decode_num_{name}_tokens" for name in ("draft", "accepted")]
    values = {metric.name: metric for metric in llm.get_metrics() if metric.name in names}
    drafted, accepted = (values[name].value for name in names)
    return drafted, accepted


def _totals(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.store.totals


def test_random_choreographies(subject: Subject) -> None:
    """A draft for a call is right as any: messages are encoded in the drafter, too."""
    before = Counter(_totals(subject.llm))
    for seed in range(3000, 3003):
        with Choreography(subject.llm) as choreography:
            check(choreography, subject.oracle, draw_choreography(seed))
    counted = Counter(_totals(subject.llm)) - before
    assert counted["drafted_tokens"] > 50
    if subject.is_right:
        assert counted["accepted_draft_tokens"] == counted["drafted_tokens"]


def test_ordinary_requests_speculate_beside_calls(subject: Subject) -> None:
    """As many drafts of theirs are right as without calls."""
    llm, oracle, is_right = subject
    rng = random.Random(5)
    documents = [random_tokens(rng, n) for n in (70, 41)]
    encoded = [oracle.encode(tokens) for tokens in documents]
    greedy = SamplingParams(max_tokens=25, temperature=0.0, ignore_eos=True)
    ordinary = [random_tokens(rng, 30 + 34 * number) for number in range(4)]
    headers = [random_tokens(rng, 30 + 34 * number) for number in range(4)]
    offsets = [0, 300, 700, 0]  # placed, or virtual indices that are far from positions
    alone = _run(llm, ordinary, [greedy] * 4)
    for prompt, generated in zip(ordinary, alone.answers, strict=True):
        _assert_greedy(oracle, prompt, generated, [], 0)
    assert llm.llm_engine.reset_prefix_cache()
    before = Counter(_totals(llm))
    with Choreography(llm) as c:
        names = [c.prefill(tokens).id for tokens in documents]
        asked = []
        for offset in offsets:
            call = {"session": c.session, "kind": "decode", "parents": names}
            call |= {"offsets": [offset, offset + 90], "new_offset": offset + 140}
            asked.append(greedy.clone())
            asked[-1].extra_args = {"choreo": call}
        beside = _run(llm, [*headers, *ordinary], [*asked, *[greedy] * 4])
    of_calls = Counter(_totals(llm)) - before
    drafted, accepted = of_calls["drafted_tokens"], of_calls["accepted_draft_tokens"]
    assert beside.answers[4:] == alone.answers
    assert (beside.drafted - drafted, beside.accepted - accepted) == alone[1:]
    for counted in ((alone.drafted, alone.accepted), (drafted, accepted)):
        assert counted[0] >= 4 * 15 and (counted[0] == counted[1]) == is_right
    for header, generated, offset in zip(headers, beside.answers, offsets, strict=False):
        parents = [whole(encoded[0], offset), whole(encoded[1], offset + 90)]
        _assert_greedy(oracle, header, generated, parents, offset + 140)


def test_what_was_evicted_is_drafted_behind(subject: Subject) -> None:
    """It comes back from host memory, or is encoded again, in the drafter as well."""
    llm, rng = subject.llm, random.Random(7)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    before = Counter(_totals(llm))
    with Choreography(llm) as c:
        messages = [c.prefill(random_tokens(rng, n)) for n in (75, 40)]
        c.evict(*messages)
        c.decode([7, 8, 9], parents=messages[::-1], offsets=[30, 200], sampling_params=greedy)
    counted = Counter(_totals(llm)) - before
    assert counted["restored_messages"] + counted["encoded_again_messages"] == 2
    assert counted["drafted_tokens"] >= 15
    if subject.is_right:
        assert counted["accepted_draft_tokens"] == counted["drafted_tokens"]


def test_a_chain_gets_the_drafts_of_its_text(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head reads each token's successor, too: that of a message's last is the one sampled."""
    llm, rng = subject.llm, random.Random(6)
    document, rest = random_tokens(rng, 75), random_tokens(rng, 20)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    passes = _noted_passes(llm, monkeypatch)
    with Choreography(llm) as c:
        message = c.prefill(document)
        header = [*passes[-1][0], *rest]
        passes.clear()
        said = c.decode(header, parents=[message], sampling_params=greedy)
    of_call = [(sampled, drafts.tolist()) for sampled, drafts in passes]
    assert llm.llm_engine.reset_prefix_cache()
    passes.clear()
    text = _run(llm, [[*document, *header]], [greedy])
    assert text.answers == [list(said.generated_token_ids)]
    # The call goes on for its last token, which is encoded behind the answer.
    assert of_call[: len(passes)] == [(sampled, drafts.tolist()) for sampled, drafts in passes]


def _noted_passes(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[int], torch.Tensor]]:
    """What was sampled in every step from now on, and drafted behind it; a list that grows."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner, passes = worker.model_runner, []
    is_v2 = llm.llm_engine.vllm_config.use_v2_model_runner
    drafter = runner.speculator if is_v2 else runner.drafter
    propose = drafter.propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        if is_v2:
            batch, last_sampled = args[0], args[7]
            sampled = last_sampled[batch.idx_mapping].view(-1).tolist()
        else:
            sampled = kwargs["next_token_ids"].tolist()
        passes.append((sampled, propose(*args, **kwargs).clone()))
        return passes[-1][1]

    monkeypatch.setattr(drafter, "propose", noted)
    return passes


class _Ran(NamedTuple):
    answers: list[list[int]]
    drafted: int
    accepted: int


def _run(llm: Any, prompts: Sequence[Sequence[int]], params: list[SamplingParams]) -> _Ran:
    before = _num_drafted(llm)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    drafted, accepted = (b - a for a, b in zip(before, _num_drafted(llm), strict=True))
    return _Ran([list(output.outputs[0].token_ids) for output in outputs], drafted, accepted)


def _assert_greedy(
    oracle: Oracle,
    header: Sequence[int],
    generated: Sequence[int],
    parents: list[Parent],
    new_offset: int,
) -> None:
    message = SimpleNamespace(
        num_tokens=len(header) + len(generated),
        token_ids=[*header, *generated],
        generated_token_ids=generated,
    )
    assert_greedy(message, oracle, parents, new_offset)


def test_suffixes_are_looked_up_for_calls(
    tiny_model_path: Callable[[str], Path], tiny_oracle: Callable[[str], Oracle]
) -> None:
    """The same call twice: what the first one answered is drafted for the second, and right."""
    oracle, rng = tiny_oracle("llama"), random.Random(8)
    document = random_tokens(rng, 60)
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with installed():
        llm = start_engine(
            tiny_model_path("llama"),
            speculative_config={"method": "suffix", "num_speculative_tokens": NUM_DRAFTED},
            num_gpu_blocks_override=66,
        )
    try:
        with Choreography(llm) as c:
            message = c.prefill(document)
            answers = [
                c.decode([5, 6, 7], parents=[message], sampling_params=greedy) for _ in range(2)
            ]
            for answer in answers:
                assert_greedy(answer, oracle, [whole(oracle.encode(document), 0)], len(document))
            check(c, oracle, draw_choreography(3010))
        totals = _totals(llm)
        assert totals["drafted_tokens"] >= totals["accepted_draft_tokens"] >= 20
    finally:
        stop_engine(llm)


@pytest.mark.parametrize(
    ("method", "asynchronous", "named"),
    [
        ("draft_model", False, "parallel_drafting"),
        ("medusa", False, "speculative_config.method"),
        ("eagle", True, "async_scheduling"),
    ],
)
def test_what_cannot_draft_is_refused(method: str, asynchronous: bool, named: str) -> None:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, parallel_drafting=True),
        model_config=SimpleNamespace(use_mla=False, is_hybrid=False),
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    with pytest.raises(UnsupportedOptionError, match=named):
        check_speculation(config)
    config.scheduler_config.async_scheduling = False
    config.speculative_config = SimpleNamespace(method="draft_model", parallel_drafting=False)
    check_speculation(config)
    for kind in ("use_mla", "is_hybrid"):
        config.model_config = SimpleNamespace(**{"use_mla": False, "is_hybrid": False, kind: True})
        with pytest.raises(UnsupportedOptionError, match=r"speculative_config\.method"):
            check_speculation(config)
