# SPDX-License-Identifier: Apache-2.0
"""Where features meet in one step, or between two: nothing is lost, mixed up, or waited for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import Adapter
from tests.engine.oracle import Oracle, Parent, random_tokens, whole
from tests.engine.stepped import Stepped, assert_says
from tests.engine.test_memory import SMALL_POOL
from tests.engine.test_tiers import BLOCK_GIB
from vllm_choreo import Choreography
from vllm_choreo.engine.utility import call
from vllm_choreo.semantics.params import ChoreoParams

# One engine for most: host and hidden memory that hold all.
ROOMY = {"host_memory_gib": 40.5 * BLOCK_GIB, "hidden_memory_gib": 0.05}


@pytest.fixture
def start(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Iterator[Callable[..., Stepped]]:
    """`start(options, setting=value, ...)`: a session on an engine; nothing may be left of it."""
    begun: list[tuple[Stepped, dict[str, Any]]] = []

    def start(options: dict[str, Any] | None = None, **settings: Any) -> Stepped:
        options = {**(SMALL_POOL if options is None else options)}
        if settings:
            options["additional_config"] = {"choreo": settings}
        stepped = Stepped(engine_slot(tiny_model_path("llama"), **options))
        begun.append((stepped, _left(stepped)))
        return stepped

    yield start
    for stepped, before in begun:
        stepped.close()
        assert _left(stepped) == before


def _left(stepped: Stepped) -> dict[str, Any]:
    """What a session must give back."""
    names = ("num_free_blocks", "num_host_blocks_used", "num_hidden_bytes", "num_calls")
    totals = call(stepped.llm, "totals")
    store = stepped.scheduler.store
    duplicates = sum(1 for _ in store.duplicates)
    return {**{name: totals[name] for name in names}, "failed": len(store._failed), "d": duplicates}


@pytest.fixture(scope="module")
def oracle(tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle("llama")


def _text(oracle: Oracle, tokens: list[int], offset: int = 0) -> Parent:
    """A message that was encoded with no parents, as a parent."""
    return whole(oracle.encode(tokens), offset)


def _check_read(stepped: Stepped, oracle: Oracle, read: list[tuple[Any, list[int]]]) -> None:
    """Calls that read these messages of facades answer by these tokens."""
    session = stepped.session
    for message, tokens in read:
        stepped.session = message.id.rsplit("/", 1)[0]
        name = f"reads {message.id}"
        stepped.submit(name, [5, 6], "decode", 3, parents=[message.id])
        stepped.finish()
        assert_says(stepped, name, oracle, [5, 6], [_text(oracle, tokens)])
    stepped.session = session


# -- host memory, loads and evictions ----------------------------------------------------------


@pytest.mark.parametrize("ends", ["stays", "is freed"])
def test_a_load_leaves_alone_what_is_evicted_and_not_copied_out_yet(
    start: Callable[..., Stepped], oracle: Oracle, tmp_path: Path, ends: str
) -> None:
    """Copies out wait for the next step; what is loaded is written at once."""
    stepped, rng = start(**ROOMY), random.Random(1)
    # One block too few is free for what is loaded where the message's host blocks are free again.
    secret, mine = random_tokens(rng, 128), random_tokens(rng, 96 if ends == "is freed" else 128)
    with (
        Choreography(stepped.llm, tenant="alice") as alice,
        Choreography(stepped.llm, tenant="bob") as bob,
        Choreography(stepped.llm, tenant="bob") as other,
    ):
        saved = bob.prefill(secret)
        bob.save([saved], str(tmp_path / "saved"), encodings=True, progress=False)
        bob.free(saved)
        message = alice.prefill(mine)
        for _ in range(alice.stats()["num_free_blocks"]):
            alice.prefill(random_tokens(rng, 32))
        alice.evict(message)
        if ends == "is freed":
            alice.free(message)
        (loaded,) = other.load(str(tmp_path / "saved"), progress=False)
        read = [(loaded, secret)] if ends == "is freed" else [(loaded, secret), (message, mine)]
        _check_read(stepped, oracle, read)


@pytest.mark.exhaustive
def test_a_load_that_makes_room_itself_overwrites_nobody(
    start: Callable[..., Stepped], oracle: Oracle, tmp_path: Path
) -> None:
    stepped, rng = start(host_memory_gib=4.5 * BLOCK_GIB), random.Random(1)
    secret, mine = random_tokens(rng, 128), random_tokens(rng, 128)
    with Choreography(stepped.llm) as c, Choreography(stepped.llm) as other:
        saved = c.prefill(secret)
        c.save([saved], str(tmp_path / "saved"), encodings=True, progress=False)
        c.free(saved)
        c.prefill(random_tokens(rng, 32))  # goes first: a block for whoever reads what is loaded
        oldest = c.prefill(mine)
        c.evict(*[c.prefill(random_tokens(rng, 32)) for _ in range(4)])  # host memory is full
        c.prefill(random_tokens(rng, 32))  # by a step
        for _ in range(c.stats()["num_free_blocks"]):
            c.prefill(random_tokens(rng, 32))
        (loaded,) = other.load(str(tmp_path / "saved"), progress=False)
        _check_read(stepped, oracle, [(loaded, secret), (oldest, mine)])


def test_a_copy_whose_target_lost_its_place_is_not_made(
    start: Callable[..., Stepped], oracle: Oracle
) -> None:
    """A patch is placed and evicted in one planning; a message comes back into its blocks."""
    stepped, rng = start(**ROOMY), random.Random(3)
    lengths = {"e": 32, "f": 256, "r": 33, "s1": 64, "s2": 64, "t1": 90}
    tokens = {name: random_tokens(rng, length) for name, length in lengths.items()}
    tokens["t2"] = tokens["t1"]  # shares two of three blocks, which count for both
    whole_run, long = [[0, 32]], [[0, 7], [40, 47]]
    reads = ["f", "r", "r", "r", "r", "r", "e"], [[], *[whole_run] * 5, []]
    for name, length in tokens.items():
        stepped.make(name, length)
        if name == "e":
            stepped.make("x", [5])
            stepped.operate("free", ["x"])
            stepped.operate("evict", ["e"])  # it lies in host memory
    store = stepped.scheduler.store
    assert store.get("s", "t1").own.blocks[0][0] is store.get("s", "t2").own.blocks[0][0]
    a, b = random_tokens(rng, 4), random_tokens(rng, 4)
    stepped.submit("a", a, "decode", 3, parents=["s1", "s2"], repair=[[], long])
    stepped.submit("b", b, "decode", 3, parents=reads[0], repair=reads[1])
    stepped.finish()
    stepped.submit("alone", [9], "decode", 3, parents=["e"])
    stepped.finish()
    assert_says(stepped, "alone", oracle, [9], [_text(oracle, tokens["e"])])
    first = stepped.generated("b")
    for name in ("a", "b", "alone"):
        stepped.operate("free", [name])
    stepped.operate("evict", [*tokens])
    stepped.submit("b again", b, "decode", 3, parents=reads[0], repair=reads[1])
    stepped.finish()
    again = stepped.generated("b again")
    assert first[0] == again[0] and first[1] == pytest.approx(again[1], abs=1e-4)


# -- requests that end while others read what they make ----------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_who_has_its_plan_goes_on_when_its_parent_is_aborted(
    start: Callable[..., Stepped], oracle: Oracle, kind: str
) -> None:
    """And can be encoded again later: its recipe is known."""
    stepped, rng = start(**ROOMY), random.Random(5)
    doc, header = random_tokens(rng, 500), random_tokens(rng, 5)
    stepped.submit("doc", doc)  # takes two steps
    stepped.submit("child", header, kind, 3, parents=["doc"])
    stepped.step()
    stepped.abort("doc")
    stepped.finish()
    assert stepped.error("child") is None
    parents = [_text(oracle, doc)]
    if kind == "decode":
        assert_says(stepped, "child", oracle, header, parents)
        header = [*header, *stepped.generated("child")[0]]
    assert stepped.llm.reset_prefix_cache()  # from host memory, too
    stepped.submit("reader", [7], "decode", 3, parents=["child"])
    stepped.finish(max_steps=20)
    child = oracle.encode(header, parents, 500)
    assert_says(stepped, "reader", oracle, [7], [whole(child, 0)])


def test_hidden_states_last_until_the_runs_that_begin_with_them(
    start: Callable[..., Stepped],
) -> None:
    """Their message is given up in the planning that queues such a run."""
    stepped, rng = start(**ROOMY), random.Random(0)
    stepped.make("z", random_tokens(rng, 40))
    stepped.make("m", random_tokens(rng, 40), parents=["z"], keep_hidden=[1])
    stepped.submit("x", random_tokens(rng, 10), "decode", 6, keep_hidden=[1])
    stepped.submit("one", random_tokens(rng, 10), parents=["m", "x"], repair={"layers": [1, 3]})
    stepped.submit("two", random_tokens(rng, 10), parents=["m", "x"], exact=True)
    stepped.step(3)
    assert stepped.operate("free", ["m"]) == 1
    stepped.finish()
    assert [stepped.error(name) for name in ("x", "one", "two")] == [None] * 3


def test_hidden_memory_is_reserved_for_what_can_be_generated(
    start: Callable[..., Stepped],
) -> None:
    stepped = start(**ROOMY)
    stepped.submit("one", [5] * 5, "decode", 1_000_000, keep_hidden=[1])
    stepped.step(3)
    totals = call(stepped.llm, "totals")
    assert 0 < totals["num_hidden_bytes"] <= 640 * 128 * 4
    stepped.submit("two", [5] * 5, "decode", 5, keep_hidden=[1])
    stepped.step(8)
    assert stepped.error("two") is None
    stepped.abort("one")


def test_what_failed_is_known_by_its_name_alone(start: Callable[..., Stepped]) -> None:
    stepped = start(**ROOMY)
    for number in range(20):
        stepped.submit(f"m{number}", [7] * 500)
        stepped.abort(f"m{number}")
    stepped.step(3)
    failed = stepped.scheduler.store._failed
    assert len(failed) == 20 and all(not message.own.token_ids for message in failed)
    stepped.submit("reader", [5], "decode", 1, parents=["m3"])
    stepped.finish()
    assert (stepped.error("reader") or {})["type"] == "ParentFailedError"


@pytest.mark.exhaustive
def test_a_chain_of_a_thousand_is_encoded_again(
    start: Callable[..., Stepped], oracle: Oracle
) -> None:
    """Each link waits for the one before it: as deep as histories are, and no call is."""
    stepped = start({"num_gpu_blocks_override": 1300, "max_model_len": 640})
    with Choreography(stepped.llm) as c:
        last = c.prefill([3, 4])
        for _ in range(1100):
            last = c.prefill([5, 6], parents=[last])
        stepped.session = last.id.rsplit("/", 1)[0]
        answers = []
        for name in ("before", "after"):
            stepped.submit(name, [5], "decode", 2, parents=[last.id])
            stepped.finish(max_steps=5000)
            answers.append(stepped.generated(name))
            stepped.llm.reset_prefix_cache()
        assert answers[0][0] == answers[1][0]
        assert answers[0][1] == pytest.approx(answers[1][1], abs=1e-4)
    stepped.session = "s"


# -- the last slot -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_parents", [0, 1])
def test_a_header_leaves_room_for_what_it_generates(
    start: Callable[..., Stepped], num_parents: int
) -> None:
    """A token, and the one that vLLM samples when that one is encoded."""
    stepped = start(**ROOMY)
    stepped.make("p", [5] * 320)
    parents = ["p"] * num_parents
    length = 640 - 320 * num_parents - 1
    stepped.submit("too long", [6] * length, "decode", 5, parents=parents)
    stepped.submit("fits", [6] * (length - 1), "decode", 5, parents=parents)
    stepped.submit("anything", [5])
    stepped.finish()
    assert (stepped.error("too long") or {})["type"] == "TooLongError"
    assert stepped.error("fits") is None and len(stepped.generated("fits")[0]) == 1
    assert stepped.error("anything") is None


# -- room: who waits is not refused ------------------------------------------------------------


def test_a_paused_engine_refuses_nobody(start: Callable[..., Stepped]) -> None:
    from vllm.v1.core.sched.interface import PauseState

    stepped = start(**ROOMY)
    stepped.make("p", [5] * 40)
    for number, state in enumerate((PauseState.PAUSED_ALL, PauseState.PAUSED_NEW)):
        stepped.scheduler.set_pause_state(state)
        stepped.submit(f"q{number}", [6, 7], "decode", 2, parents=["p"])
        stepped.step(5)
        assert f"q{number}" not in stepped.outputs
        stepped.scheduler.set_pause_state(PauseState.UNPAUSED)
        stepped.finish()
        assert stepped.error(f"q{number}") is None


def test_a_call_waits_for_what_a_save_reads(start: Callable[..., Stepped]) -> None:
    """And a save whose client has gone is not waited for, for ever: it is told that it failed."""
    stepped = start(**ROOMY)
    stepped.make("a", [5] * 512)
    told = stepped.operate("snapshot_describe", ["a"])
    held = call(stepped.llm, "snapshot_hold", told["ticket"], 0)
    stepped.submit("b", [6] * 300)
    stepped.step(50)
    assert "b" not in stepped.outputs
    assert call(stepped.llm, "snapshot_release", held["ticket"]) is True
    stepped.finish()
    assert stepped.error("b") is None
    stepped.operate("free", ["b"])
    stepped.submit("reader", [5], "decode", 1, parents=["a"])
    stepped.finish()
    held = call(stepped.llm, "snapshot_hold", told["ticket"], 0)
    stepped.submit("c", [6] * 300)
    stepped.finish(max_steps=20_000)
    assert stepped.error("c") is None
    assert call(stepped.llm, "snapshot_release", held["ticket"]) is False
    call(stepped.llm, "snapshot_release_ticket", told["ticket"])


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_repaired_call_waits_for_what_is_completed(
    start: Callable[..., Stepped], when: str
) -> None:
    """An answer's last token holds its parents for one more step."""
    stepped, rng = start(**ROOMY), random.Random(0)
    for name, num_blocks in (("e", 10), ("a", 3), ("b", 4)):
        stepped.make(name, random_tokens(rng, 32 * num_blocks))
    stepped.submit("d", random_tokens(rng, 8), "decode", 4, parents=["e"])
    while "d" not in stepped.outputs:
        stepped.step()
    if when == "later":
        stepped.step()
    stepped.submit("c", random_tokens(rng, 4), parents=["a", "b"], repair="first:96")
    stepped.finish()
    assert stepped.error("c") is None


def test_waiting_for_room_is_not_running_in_circles(start: Callable[..., Stepped]) -> None:
    stepped, rng = start(**ROOMY), random.Random(0)
    stepped.make("f", random_tokens(rng, 16 * 32))
    stepped.make("a", random_tokens(rng, 32))
    stepped.make("b", random_tokens(rng, 64))
    stepped.submit("answer", [5], "decode", 60, parents=["f"])
    stepped.step()
    stepped.submit("c", random_tokens(rng, 4), parents=["a", "b"], repair="first:7")
    stepped.finish()
    assert stepped.error("answer") is None and stepped.error("c") is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("host_memory", [0, 40.5 * BLOCK_GIB])
def test_a_tenant_over_its_share_keeps_what_its_call_needs(
    start: Callable[..., Stepped], host_memory: float
) -> None:
    """The source of a patch that a call waits for is in use."""
    stepped, rng = start(tenant_share=0.3, host_memory_gib=host_memory), random.Random(0)
    stepped.make("b", random_tokens(rng, 128))
    stepped.make("a", random_tokens(rng, 128))
    stepped.make("x", [5])
    stepped.operate("free", ["x"])
    stepped.operate("evict", ["b"])
    stepped.submit("c", random_tokens(rng, 4), parents=["a", "b"], repair="first:7")
    stepped.finish(max_steps=20)
    assert stepped.error("c") is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("reposition", ["query", "in_place"])
def test_a_call_that_fits_without_copies_of_its_parents_runs(
    start: Callable[..., Stepped], oracle: Oracle, reposition: str
) -> None:
    stepped, rng = start(reposition=reposition), random.Random(0)
    tokens, header = random_tokens(rng, 6 * 32), random_tokens(rng, 7 * 32 - 4)
    stepped.make("p", tokens)
    # Parents take 12 of 20 virtual blocks, 6 real ones; own tokens take 7.
    stepped.submit("c", header, "decode", 2, parents=["p", "p"], offsets=[3, 200])
    stepped.finish()
    assert stepped.error("c") is None
    parents = [_text(oracle, tokens, 3), _text(oracle, tokens, 200)]
    assert_says(stepped, "c", oracle, header, parents)


@pytest.mark.exhaustive
def test_an_answer_that_runs_alone_takes_what_others_wait_for(
    start: Callable[..., Stepped],
) -> None:
    stepped, rng = start({"num_gpu_blocks_override": 33, "max_model_len": 1024}), random.Random(0)
    stepped.make("p1", random_tokens(rng, 16 * 32))
    stepped.make("p2", random_tokens(rng, 8 * 32))
    stepped.submit("answer", random_tokens(rng, 10), "decode", 350)  # at most 12 blocks
    for number in (1, 2):
        parents = [f"p{number}", "answer"]
        stepped.submit(f"w{number}", random_tokens(rng, 3), "decode", 2, parents=parents)
    stepped.finish(max_steps=1500)
    assert [stepped.error(name) for name in ("answer", "w1", "w2")] == [None] * 3


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_all_who_wait_for_what_cannot_be_encoded_again_are_told(
    start: Callable[..., Stepped], tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The weights of an adapter were replaced; it encoded a message two links up."""
    options = {**SMALL_POOL, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    stepped = start(options)
    adapter = Adapter(tiny_model_path("llama"), tmp_path / "old", 1)
    with Choreography(stepped.llm) as c:
        old = c.prefill([5] * 40, adapter=adapter.request)
        link = c.prefill([6] * 40, parents=[old])
        other = Adapter(tiny_model_path("llama"), tmp_path / "new", 1, seed=2)
        for file in other.path.iterdir():
            (adapter.path / file.name).write_bytes(file.read_bytes())
        c.prefill([7, 8], adapter=adapter.request)  # the new weights are loaded
        c.evict(old, link)
        stepped.session = link.id.rsplit("/", 1)[0]
        for name in ("first", "second"):
            stepped.submit(name, [5], "decode", 1, parents=[link.id])
        stepped.finish(max_steps=20)
        stepped.submit("third", [5], "decode", 1, parents=[link.id])
        stepped.finish(max_steps=20)
        for name in ("first", "second", "third"):
            assert "replaced" in (stepped.error(name) or {})["message"]
        assert not stepped.scheduler.requests and not stepped.scheduler.call_table.calls
    stepped.session = "s"


@pytest.mark.exhaustive
def test_who_reads_what_is_refused_in_the_same_moment_is_told(
    start: Callable[..., Stepped],
) -> None:
    """A call that is refused leaves no plan behind: nobody takes its message for known."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    stepped, rng = start({**SMALL_POOL, "speculative_config": draft}), random.Random(0)
    stepped.make("a", random_tokens(rng, 40))
    stepped.make("b", random_tokens(rng, 40))
    stepped.submit("p", random_tokens(rng, 10), parents=["a", "b"], repair=[[], [[5, 6]]])
    stepped.submit("child", random_tokens(rng, 10), parents=["p"])
    stepped.finish()
    assert (stepped.error("p") or {})["type"] == "RepairError"
    assert (stepped.error("child") or {})["type"] == "ParentFailedError"


@pytest.mark.exhaustive
def test_loads_reserve_nothing_for_what_nobody_can_name(
    start: Callable[..., Stepped], tmp_path: Path
) -> None:
    """Neither hidden memory of freed messages, nor a place among duplicates for refused names."""
    stepped, rng = start(hidden_memory_gib=0.0004), random.Random(0)
    with Choreography(stepped.llm) as c:
        a = c.prefill(random_tokens(rng, 200), keep_hidden=[1, 2])
        b = c.prefill(random_tokens(rng, 10), parents=[a])
        c.free(a)
        c.save([b], str(tmp_path / "saved"), encodings=True, progress=False)
    before = _left(stepped)
    for _ in range(3):
        with Choreography(stepped.llm) as d:
            d.load(str(tmp_path / "saved"), progress=False)
        assert _left(stepped) == before
    with Choreography(stepped.llm) as d:
        d.prefill(random_tokens(rng, 100), keep_hidden=[1])


def test_an_unexpected_error_ends_one_call(
    start: Callable[..., Stepped], oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = start(**ROOMY)
    real = ChoreoParams.from_extra_args

    def broken(extra_args: Any) -> ChoreoParams:
        params = real(extra_args)
        if params.save_as == "odd":
            raise RuntimeError("nobody has thought of this")
        return params

    monkeypatch.setattr(ChoreoParams, "from_extra_args", broken)
    stepped.submit("odd", [5, 6])
    stepped.submit("beside", [5, 6], "decode", 3)
    stepped.finish()
    assert "RuntimeError" in (stepped.error("odd") or {})["message"]
    assert_says(stepped, "beside", oracle, [5, 6], [])


@pytest.mark.parametrize("when", ["while it is generated", "before its end is told"])
def test_who_reads_an_open_message_that_is_freed_is_told(
    start: Callable[..., Stepped], when: str
) -> None:
    """Where an answer with stop strings ends only its client can tell, by its name."""
    stepped = start(**ROOMY)
    stepped.submit("open", [5, 6], "decode", 3, open_end=True)
    stepped.submit("reader", [7], "decode", 1, parents=["open"])
    stepped.step(1 if when == "while it is generated" else 5)
    stepped.operate("free", ["open"])
    stepped.finish(max_steps=20)
    assert "freed" in (stepped.error("reader") or {})["message"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_who_is_refused_a_name_ends_nothing_of_who_has_it(
    is_complete: bool, start: Callable[..., Stepped]
) -> None:
    """Its client goes away before it hears so, and tells that it keeps nothing."""
    stepped = start(**ROOMY)
    stepped.submit("name", [5, 6], "decode", 3, open_end=not is_complete)
    stepped.step(6 if is_complete else 1)
    assert stepped.operate("end", "name", 0, "another request") is None
    message = stepped.scheduler.store.get(stepped.session, "name")
    assert message.failure is None
    if is_complete:
        assert stepped.operate("end", "name", 0) is None, "it is complete: nothing is open"
        assert message.failure is None
    else:
        stepped.abort("name")
        assert stepped.operate("end", "name", 0, message.request) is None
        assert message.failure is not None


def test_a_message_fails_once(start: Callable[..., Stepped]) -> None:
    """Its client aborts its request, and tells then that it keeps nothing of it."""
    stepped = start(**ROOMY)
    stepped.submit("open", [5, 6], "decode", 3, open_end=True)
    stepped.step()
    stepped.abort("open")
    assert stepped.operate("end", "open", 0) is None
    assert len(stepped.scheduler.store._failed) == 1


def test_calls_that_wait_for_an_answer_cost_no_step_anything(start: Callable[..., Stepped]) -> None:
    """They are no part of vLLM's queue until it is complete; then they come in their turn."""
    stepped = start(**ROOMY)
    stepped.submit("answer", [5, 6], "decode", 8)
    names = [f"c{number}" for number in range(100)]
    for name in names:
        stepped.submit(name, [7], "decode", 1, parents=["answer"])
    stepped.submit("gone", [7], parents=["answer"])
    stepped.step(2)
    assert call(stepped.llm, "totals")["num_calls_waiting"] == len(names) + 1
    stepped.submit("later", [7])
    assert [r.request_id.split("-")[0] for r in stepped.scheduler.waiting] == ["later"]
    stepped.abort("gone")
    stepped.finish()
    assert not any(stepped.error(name) for name in [*names, "later"])
    order = [name for name in stepped.outputs if name in names]
    assert order == names


def test_a_name_that_failed_may_be_taken_again(start: Callable[..., Stepped]) -> None:
    stepped = start(**ROOMY)
    stepped.submit("m", [5] * 500)
    stepped.abort("m")
    stepped.make("m", [6])
    assert not stepped.scheduler.store._failed
    stepped.submit("reader", [7], "decode", 1, parents=["m"])
    stepped.finish()
    assert stepped.error("reader") is None
