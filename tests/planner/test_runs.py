# SPDX-License-Identifier: Apache-2.0
"""Runs: what fails leaves the rest, what was killed goes on, what is cached is not asked again."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.planner.facades import AsyncDigestFacade, DigestFacade
from tests.planner.graphs import RandomGraph
from vllm_choreo.errors import EngineRestartedError, TooLongError
from vllm_choreo.planner import (
    AnswerCache,
    FacadeWorker,
    Msg,
    Planner,
    Profile,
    Retry,
    ainvoke,
    build,
    invoke,
    naive,
    ops,
    profile,
)
from vllm_choreo.planner.errors import (
    GraphError,
    ImpureFunctionError,
    InputFailedError,
    JournalError,
    OperatorFailedError,
)
from vllm_choreo.planner.logical.graph import CompiledGraph

QUESTIONS = ["one", "two", "three", "four"]


def two_steps(batch: Any = tuple(QUESTIONS), **options: Any) -> CompiledGraph:
    q = ops.placeholder("q")
    draft = ops.llm([Msg("system", "You answer. " * 20), Msg("user", q)], name="draft", **options)
    final = ops.llm([Msg("user", ops.fmt("Improve: {}", draft))], name="final")
    return build([final]).compile(q=list(batch))


def refuse(word: str, error: Exception, times: int = 10**9) -> Any:
    left = itertools.count()

    def fails(prompt: str, number: int) -> None:
        if word in prompt and next(left) < times:
            raise error

    return fails


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("facade_type", [DigestFacade, AsyncDigestFacade])
def test_one_querys_failure_leaves_the_others(facade_type: Any) -> None:
    facade = facade_type(fails=refuse("two", TooLongError("too long", parameter="header")))
    result = invoke(two_steps(), facade)
    expected = naive(two_steps(), DigestFacade("baseline"))
    assert set(result.errors) == {1}
    assert {n: result[n] for n in (0, 2, 3)} == {n: expected[n] for n in (0, 2, 3)}
    with pytest.raises(
        InputFailedError,
        match=r"operator final at test_runs\.py:\d+: not run: "
        r"operator draft at test_runs\.py:\d+: TooLongError: too long",
    ):
        result[1]
    assert isinstance(result.errors[1].__cause__, OperatorFailedError)
    assert isinstance(result.errors[1].__cause__.__cause__, TooLongError)


def test_a_function_that_raises_fails_its_queries_alone() -> None:
    q = ops.placeholder("q")
    parsed = ops.fn(lambda text: str(1 // len(text)), q, name="parse")
    result = invoke(build([parsed]).compile(q=["a", "", "b"]), DigestFacade())
    assert set(result.errors) == {1} and result[2] == "1"
    assert "ZeroDivisionError" in str(result.errors[1])


def test_a_function_that_is_not_pure_is_found_out() -> None:
    count = itertools.count()
    op = ops.fn(lambda text: f"{text}{next(count)}", ops.placeholder("q"), name="ticket")
    result = invoke(build([op]).compile(q=["a"]), DigestFacade())
    with pytest.raises(ImpureFunctionError, match=r"operator ticket at test_runs.*pure=False"):
        result[0]
    impure = ops.fn(lambda: f"{next(count)}", pure=False)
    each = invoke(build([impure, ops.placeholder("q")]).compile(q=["a"] * 3), DigestFacade())
    assert len({result["fn_1"] for result in each}) == 3


def test_what_may_pass_is_tried_again() -> None:
    fails = refuse("two", EngineRestartedError("gone"), times=2)
    result = invoke(two_steps(), DigestFacade(fails=fails), retry=Retry(times=2))
    assert list(result) == naive(two_steps(), DigestFacade("baseline"))
    assert result.stats.num_retries == 2
    gone = DigestFacade(fails=refuse("two", OSError("gone")))
    again = invoke(two_steps(), gone, retry=Retry(1))
    assert set(again.errors) == {1} and again.stats.num_retries == 1


def test_what_is_refused_for_its_content_is_not_tried_again() -> None:
    facade = DigestFacade(fails=refuse("two", TooLongError("too long")))
    result = invoke(two_steps(), facade, retry=Retry(times=5))
    assert set(result.errors) == {1} and result.stats.num_retries == 0


def test_a_shared_beginning_that_fails_is_encoded_again() -> None:
    class Flaky(DigestFacade):
        failed = 0

        def prefill(self, tokens: Any, **options: Any) -> Any:
            if not self.failed:
                self.failed += 1
                raise EngineRestartedError("gone")
            return super().prefill(tokens, **options)

    q = ops.placeholder("q")
    shared = ops.fmt("Consider carefully: {}" + " and then some more" * 9, q)
    asked = [ops.llm([Msg("user", shared), Msg("user", word)]) for word in ("a", "b", "c")]
    compiled = build(asked).compile(q=["x"])
    result = invoke(compiled, Flaky("exact"))
    assert list(result) == naive(compiled, DigestFacade("baseline"))


def test_an_event_loop_that_runs_already_is_told() -> None:
    async def inside() -> None:
        invoke(two_steps(), DigestFacade())

    with pytest.raises(GraphError, match="await ainvoke"):
        asyncio.run(inside())
    result = asyncio.run(ainvoke(two_steps(), AsyncDigestFacade()))
    assert list(result) == naive(two_steps(), DigestFacade("baseline"))


# -- results, order, width -------------------------------------------------------------------------


def test_results_come_as_they_are_done() -> None:
    seen: list[tuple[int, Any]] = []
    result = invoke(two_steps(), AsyncDigestFacade(), on_result=lambda *told: seen.append(told))
    assert sorted(seen) == list(enumerate(result))


def test_no_more_calls_at_a_time_than_a_worker_takes() -> None:
    facade = AsyncDigestFacade()
    invoke(two_steps([str(n) for n in range(40)]), FacadeWorker(facade, width=5))
    assert facade.most == 5
    sync = DigestFacade()
    invoke(two_steps([str(n) for n in range(40)]), FacadeWorker(sync, width=7))
    assert max(sync.waves) <= 7 and len(sync.decodes) == 80


def test_a_run_is_a_page() -> None:
    facades = [
        AsyncDigestFacade(fails=refuse("two", EngineRestartedError("gone"), 1)) for _ in "ab"
    ]
    page = invoke(two_steps(), facades).page("<My run>")
    assert page.count("<rect") == 8 and page.count('class="call again"') == 1
    assert "worker 1" in page and "draft, query 0" in page and "&lt;My run&gt;" in page
    assert "http" not in page and "<script" not in page


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("semantics", ["exact", "choreo"])
def test_several_workers(num_workers: int, semantics: str) -> None:
    facades = [AsyncDigestFacade("choreo") for _ in range(num_workers)]
    for seed in range(10):
        compiled = RandomGraph(seed, num_ops=20).compile(6)
        result = invoke(compiled, facades, semantics=semantics)
        assert list(result) == naive(compiled, DigestFacade("baseline"))
    assert all(facade.decodes for facade in facades)


class _Forgetful(FacadeWorker):
    """Answers may be moved from it or to it, but never arrive."""

    asked = 0

    def __init__(self, facade: Any) -> None:
        super().__init__(facade)
        self.min_moved_tokens = 0.0

    async def give(self, message: Any) -> Any:
        type(self).asked += 1
        raise ConnectionError("the wire is cut")


def test_answers_that_cannot_be_moved_are_read_as_text() -> None:
    long: dict[str, Any] = {"length": lambda prompt: 60}
    workers = [_Forgetful(AsyncDigestFacade("choreo", **long)) for _ in range(3)]
    for seed in range(10):
        compiled = RandomGraph(seed, num_ops=20).compile(6)
        planner = Planner(workers, semantics="choreo")
        planner.invoke(compiled)  # how long answers are
        result = planner.invoke(compiled)
        assert list(result) == naive(compiled, DigestFacade("baseline", **long))
        assert not result.stats.num_moved
    assert _Forgetful.asked


# -- caches ----------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> AnswerCache:
    return AnswerCache(None if request.param == "memory" else tmp_path / "cache.db", max_entries=5)


def test_the_cache_drops_what_was_not_used_for_longest(cache: AnswerCache) -> None:
    for number in range(5):
        cache.put(str(number), {"value": number})
    assert cache.get("0") == (True, {"value": 0})
    cache.put("5", None)
    assert cache.get("1") == (False, None)
    assert cache.get("0")[0] and cache.get("5") == (True, None)
    assert len(cache) == 5 and (cache.hits, cache.misses) == (3, 1)
    cache.clear()
    assert len(cache) == 0
    cache.close()


def test_tenants_share_no_entries(tmp_path: Path) -> None:
    mine = AnswerCache(tmp_path / "cache.db", tenant="mine", max_entries=2)
    yours = AnswerCache(tmp_path / "cache.db", tenant="yours", max_entries=2)
    mine.put("key", "value")
    assert yours.get("key") == (False, None)
    for number in range(5):
        yours.put(str(number), number)
    assert mine.get("key") == (True, "value")
    yours.clear()
    assert len(mine) == 1


def test_a_cache_in_a_file_outlives_the_process(tmp_path: Path) -> None:
    compiled = two_steps()
    first = invoke(compiled, DigestFacade(), cache=AnswerCache(tmp_path / "cache.db"))
    facade = DigestFacade()
    again = invoke(compiled, facade, cache=AnswerCache(tmp_path / "cache.db"))
    assert list(again) == list(first) and not facade.calls
    assert again.plan.num_fetched == 8


def test_what_is_half_known_is_half_fetched() -> None:
    cache = AnswerCache()
    invoke(two_steps(["one", "two"]), DigestFacade(), cache=cache)
    facade = DigestFacade()
    invoke(two_steps(["two", "three"]), facade, cache=cache)
    assert len(facade.decodes) == 2


def test_sampled_calls_are_never_cached() -> None:
    cache, facade = AnswerCache(), DigestFacade()
    compiled = two_steps(["x"], sampling={"temperature": 0.5})
    answers = [invoke(compiled, facade, cache=cache)[0] for _ in range(3)]
    assert len(set(answers)) == 3


def test_other_semantics_and_other_decoding_are_other_entries() -> None:
    cache = AnswerCache()
    invoke(two_steps(["x"]), DigestFacade(), cache=cache)
    for other in ({"semantics": "choreo"}, {}):
        facade = DigestFacade()
        sampling = {} if other else {"max_tokens": 7}
        invoke(two_steps(["x"], sampling=sampling), facade, cache=cache, **other)
        assert len(facade.decodes) >= 1


# -- journal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_killed_run_goes_on(tmp_path: Path, after: int) -> None:
    book = tmp_path / "run.jsonl"
    seen = itertools.count()

    def kill(prompt: str, number: int) -> None:
        if next(seen) == after:
            os._exit(9)

    child = os.fork()
    if not child:
        invoke(two_steps(), AsyncDigestFacade(fails=kill), journal=book)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with book.open("ab") as file:
        file.write(b'{"key": "cut of')  # what a kill may leave of the last line
    facade = DigestFacade()
    result = invoke(two_steps(), facade, journal=book)
    assert list(result) == naive(two_steps(), DigestFacade("baseline"))
    assert len(facade.decodes) == 8 - after
    third = DigestFacade()
    assert list(invoke(two_steps(), third, journal=book)) == list(result)
    assert not third.calls


def test_sampled_answers_of_a_journal_are_kept(tmp_path: Path) -> None:
    compiled = two_steps(["x", "x"], sampling={"temperature": 0.5})
    first = invoke(compiled, DigestFacade(), journal=tmp_path / "j")
    assert list(invoke(compiled, DigestFacade(), journal=tmp_path / "j")) == list(first)
    assert first[0] != first[1]


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    book = tmp_path / "run.jsonl"
    invoke(two_steps(["x"]), DigestFacade(), journal=book)
    for other in (two_steps(["y"]), RandomGraph(1).compile()):
        with pytest.raises(JournalError, match="another graph"):
            invoke(other, DigestFacade(), journal=book)
    with pytest.raises(JournalError, match="another"):
        invoke(two_steps(["x"]), DigestFacade(), journal=book, semantics="choreo")
    book.write_text("no journal\n")
    with pytest.raises(JournalError, match="damaged"):
        invoke(two_steps(["x"]), DigestFacade(), journal=book)


# -- profile, static beginnings --------------------------------------------------------------------


def test_a_profile_tells_how_much_operators_generate(tmp_path: Path) -> None:
    facade = DigestFacade(length=lambda prompt: 9 if "Improve" in prompt else 5)
    found = profile(two_steps(), facade)
    assert found.num_out["draft"] == 6 and found.num_out["final"] == 10  # and the end token
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(GraphError, match="no profile"):
        Profile.load(tmp_path / "profile.json")


def test_static_beginnings_are_encoded_once_for_all_batches() -> None:
    facade = DigestFacade("exact")
    planner = Planner(facade)
    planner.invoke(two_steps(["a", "b"]))
    planner.invoke(two_steps(["c"]))
    prefills = [said for said in facade.calls if said.kind == "prefill"]
    assert [said.header for said in prefills] == [
        "<|im_start|>system\n" + "You answer. " * 20 + "<|im_end|>\n"
    ]
    assert facade.pinned and not facade.pinned & facade.freed
    drafts = [said for said in facade.decodes if said.parents]
    assert len(drafts) == 3 and all(said.mode == "exact" for said in drafts)


def test_what_the_planner_is_not_given_it_says() -> None:
    class Somewhere(DigestFacade):
        model = None  # type: ignore[assignment]

    with pytest.raises(GraphError, match=r"FacadeWorker\(facade, model=\.\.\.\)"):
        Planner(Somewhere(), cache=AnswerCache())
    Planner(FacadeWorker(Somewhere(), model="mine"), cache=AnswerCache())
    with pytest.raises(GraphError, match="exact and choreo"):
        Planner(DigestFacade(), semantics="fast")
    with pytest.raises(GraphError, match="at least one worker"):
        Planner([])
