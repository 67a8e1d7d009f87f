# SPDX-License-Identifier: Apache-2.0
"""Runs one program, one step of the engine at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from tests.engine.feature_machine import invariants
from tests.engine.feature_machine.configurations import HIDDEN_ROW, Configuration
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.judging import Judge
from tests.engine.feature_machine.keeping import Keepings
from tests.engine.feature_machine.ledger import Ledger, Limits, Made
from tests.engine.feature_machine.program import (
    TENANTS,
    Abort,
    Asks,
    Call,
    Close,
    Evict,
    Free,
    Load,
    Operation,
    Ordinary,
    Pause,
    Pin,
    Reset,
    Resume,
    Save,
    Settle,
    Steps,
    Unpin,
)
from tests.engine.feature_machine.shown import Shown
from tests.engine.feature_machine.truth import AnyTruth
from tests.engine.fp8_witness import Witness
from vllm_choreo.errors import ChoreoError

# Steps without an answer. A call whose parents evict one another in turn is refused after eight
# rounds, of which each encodes all that they were made of: some dozens of steps.
MAX_IDLE_STEPS = 1500
_PIN_SECONDS = 1e9


class Run:
    """One program on an engine: what it asks, what it is told, and what is checked meanwhile.

    Args:
        llm: the engine; as new.
        adapters: vLLM's requests for them, by number from 1.
        counts: what happens is counted.
        shown: pictures that programs show.
        witness: compares what is read and stored in 8 bits; None: the truth knows it all.
    """

    def __init__(
        self,
        llm: Any,
        configuration: Configuration,
        truth: AnyTruth,
        adapters: Sequence[Any],
        counts: Counter[str],
        shown: Shown,
        witness: Witness | None = None,
    ) -> None:
        self._witness = witness
        self._llm = llm
        self._engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core.engine_core
        self._adapters = adapters
        self._counts = counts
        self._keeps_hidden = configuration.hidden_bytes > 0
        limits = Limits(
            configuration.num_whole_blocks,
            configuration.max_model_len,
            configuration.hidden_bytes,
            HIDDEN_ROW,
            2 if configuration.speculates else 1,
            configuration.block_size,
            cuts_parents=configuration.composes,
            num_held_pictures=configuration.num_held_pictures,
        )
        self._ledger = Ledger(limits, shown)
        self._shown = shown
        self._judge = Judge(truth, self._ledger, self._core, counts, shown, witness)
        self._keepings = Keepings(
            self, self._ledger, self._engine.vllm_config, f"feature-machine-{id(self)}", shown
        )
        self._running: dict[str, Made | Ordinary] = {}  # by request
        self._request_ids: set[str] = set()  # of all calls
        self._ends: list[tuple[int, Made]] = []  # and the step after which the client tells
        self._answers: list[tuple[Ordinary, Any]] = []
        self._num_steps = 0
        self._num_closed = Counter[str]()

    def run(self, operations: Iterable[Operation]) -> None:
        """Run a program and close all its sessions.

        Raises:
            AssertionError: something is wrong. Or what the engine raised.
        """
        try:
            with self._witness.watching() if self._witness else nullcontext():
                for operation in operations:
                    getattr(self, f"_{type(operation).__name__.lower()}")(operation)
                    self.check()
                self._resume(Resume())
                self._settle(Settle())
                self._judge.judge(self._answers)
                self._close_all()
        except BaseException:
            # Nobody else knows these: another run would find what they hold, and not them.
            self._keepings.give_up()
            self._keepings.forget()
            raise

    # -- calls -----------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        if call.copy_of is not None:
            origin = self._ledger.find(call.session, call.copy_of)
            if origin is not None and origin.tokens is None:
                return  # a client does not know what it would copy
        self._counts["calls"] += 1
        self.submit(call)

    def submit(self, call: Call) -> Made:
        """A call arrives at the engine."""
        from vllm.exceptions import VLLMValidationError

        made = self._ledger.open(call)
        # A name is given again when its message is gone; what was seen of a request goes by its id.
        request_id, number = made.id, 0
        while request_id in self._request_ids:
            number += 1
            request_id = f"{made.id}#{number}"
        try:
            self._engine.add_request(
                request_id,
                self._shown.prompt(self._engine, call, TENANTS[call.session]),
                _params(made).apply(_sampling(call)),
                lora_request=self._adapter(call.adapter),
                priority=call.priority,
            )
        except ChoreoError as error:
            self._refused(made, type(error).__name__)
            return made
        except VLLMValidationError:  # a prompt that is too long
            self._refused(made, "TooLongError")
            return made
        self._running[request_id] = made
        self._request_ids.add(request_id)
        # What the engine refuses at once has no name.
        if not made.must and self._message_of(made) is not None:
            self._ledger.enter(made)
        return made

    def _adapter(self, number: int) -> Any:
        return self._adapters[number - 1] if number else None

    def _ordinary(self, ordinary: Ordinary) -> None:
        if ordinary.name in self._running:
            return
        self._counts["ordinary"] += 1
        call = Call("a", ordinary.name, ordinary.text, generate=ordinary.generate)
        self._engine.add_request(
            ordinary.name,
            self._shown.prompt(self._engine, ordinary, ""),
            _sampling(call),
            lora_request=self._adapter(ordinary.adapter),
            priority=ordinary.priority,
        )
        self._running[ordinary.name] = ordinary

    def _abort(self, abort: Abort) -> None:
        for request_id, running in list(self._running.items()):
            name = running.name if isinstance(running, Ordinary) else running.call.name
            if name == abort.name:
                ids = self._engine.output_processor.external_req_ids.get(request_id, [])
                self._engine.abort_request([request_id])
                del self._running[request_id]
                self._counts["aborted"] += 1
                if isinstance(running, Made):
                    self._aborted(running, *ids)

    def _aborted(self, made: Made, request: str = "") -> None:
        """Tell that nothing of it is kept, if the client must; `request`: the engine's id."""
        made.is_aborted, made.state = True, "failed"
        if made.call.stop:
            self.operation("end", made.call.session, made.id, 0, request)
        # It may have been complete before its answer went out. What has not got its name, for that
        # was taken, is not what the engine has under it.
        has_name = self._ledger.find(made.call.session, made.call.name) is made
        message = self._message_of(made) if has_name else None
        if message is not None and not message.failure and made.tokens is not None:
            made.state = "made"
        made.error = "aborted"
        self._keepings.ended(made)

    # -- steps -----------------------------------------------------------------------------

    def _steps(self, steps: Steps) -> None:
        for _ in range(steps.count):
            self._step()

    def _settle(self, settle: Settle) -> None:
        """Until everything is answered. Raises Broken: that takes too long."""
        idle = 0
        while self._running or self._keepings or self._ends or self._is_busy():
            if self._core.is_scheduler_paused():
                return
            before = self._progress()
            self._keepings.advance(2)
            self._step()
            idle = idle + 1 if self._progress() == before else 0
            if idle > MAX_IDLE_STEPS:
                raise Broken("nothing is answered any more", [*self._running])

    def _progress(self) -> tuple[int, ...]:
        keepings = self._keepings
        return len(self._running), len(keepings), len(self._ends), keepings.num_asked

    def _is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests() or self._core.batch_queue)

    def _step(self) -> None:
        self._counts["steps"] += 1
        self._num_steps += 1
        guard = self._core.scheduler.progress_guard
        num_alone = guard.num_alone
        outputs = self._engine.step()
        self._counts["served alone"] += guard.num_alone - num_alone
        for output in outputs:
            if output.finished:
                self._answer(output)
        due = [end for end in self._ends if end[0] <= self._num_steps]
        for end in due:
            self._ends.remove(end)
            self._end(end[1])
        self.check()

    def check(self) -> None:
        """Recount. Raises Broken."""
        invariants.check(self._core.scheduler)

    def _answer(self, output: Any) -> None:
        answered = self._running.pop(output.request_id, None)
        if answered is None:
            raise Broken("an answer to what nobody asks, or asks no more", output.request_id)
        if isinstance(answered, Ordinary):
            self._answers.append((answered, output))
            return
        answered.answer = output
        report = output.kv_transfer_params or {}
        reason = output.outputs[0].finish_reason
        if "choreo_error" in report:
            self._refused(answered, report["choreo_error"]["type"])
            return
        if reason in ("abort", "error"):
            self._refused(answered, reason)
            return
        if answered.call.stop:
            answered.state = "open"
            self._ends.append((self._num_steps + answered.call.end_after, answered))
        else:
            self._complete(answered)
        self._keepings.ended(answered)

    def _refused(self, made: Made, error: str) -> None:
        made.state, made.error = "failed", error
        self._counts[f"refused: {error}"] += 1
        self._keepings.ended(made)

    def _end(self, made: Made) -> None:
        """The client tells where a call with stop strings ends."""
        count = len(made.header) + len(made.answer.outputs[0].token_ids)
        self.operation("end", made.call.session, made.id, count)
        self._complete(made)

    def _complete(self, made: Made) -> None:
        made.state = "made"
        if made.is_decode:
            made.tokens = (*made.header, *made.answer.outputs[0].token_ids)

    # -- between steps ---------------------------------------------------------------------

    def operation(self, name: str, *args: Any) -> Any:
        """Of the scheduler."""
        from vllm_choreo.engine.utility import call

        return call(self._llm, name, *args)

    def of_workers(self, method: str, *args: Any) -> list[Any]:
        from vllm_choreo.engine.utility import of_workers

        return of_workers(self._llm, method, *args)

    def free(self, session: str, names: Sequence[str]) -> None:
        self.operation("free", session, [f"{session}/{name}" for name in names])
        self._ledger.free(session, names)

    def num_closed(self, session: str) -> int:
        """How often a session was closed."""
        return self._num_closed[session]

    def _free(self, free: Free) -> None:
        self.free(free.session, free.names)

    def _evict(self, evict: Evict) -> None:
        self._named("evict", evict.session, evict.names)

    def _pin(self, pin: Pin) -> None:
        self._named("pin", pin.session, pin.names, _PIN_SECONDS, may=("LimitError",))

    def _unpin(self, unpin: Unpin) -> None:
        self._named("unpin", unpin.session, unpin.names)

    def _named(
        self,
        operation: str,
        session: str,
        names: Sequence[str],
        *args: Any,
        may: Sequence[str] = (),
    ) -> None:
        """An operation on messages: refused if there is one that the session does not have."""
        ids = [f"{session}/{name}" for name in names]
        answer = self.operation(operation, session, ids, *args)
        is_refused = isinstance(answer, dict) and "choreo_error" in answer
        error = answer["choreo_error"]["type"] if is_refused else None
        is_unknown = any(self._ledger.find(session, name) is None for name in names)
        allowed = ("UnknownMessageError",) if is_unknown else (None, *may)
        if error not in allowed:
            raise Broken(f"{operation} is answered by {error}", answer)

    def _close(self, close: Close) -> None:
        self.operation("close", close.session)
        self._num_closed[close.session] += 1
        self._ledger.free(close.session, [*self._ledger.of_session(close.session)])

    def _pause(self, pause: Pause) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if pause.drain:
            self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        else:
            self._core.pause_scheduler(mode="keep", clear_cache=False)

    def _resume(self, resume: Resume) -> None:
        self._core.resume_scheduler()

    def _reset(self, reset: Reset) -> None:
        self._llm.reset_prefix_cache()
        if self._shown.has_pictures and not self._is_busy():
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()

    def _save(self, save: Save) -> None:
        self._counts["saves"] += self._keepings.save(save)

    def _load(self, load: Load) -> None:
        self._counts["loads"] += self._keepings.load(load)

    def _asks(self, asks: Asks) -> None:
        self._keepings.advance(asks.count)

    def _message_of(self, made: Made) -> Any:
        """The engine's message of that name, whoever's it is."""
        return self._core.scheduler.store.find(made.call.session, made.id)

    # -- the end ---------------------------------------------------------------------------

    def give_up(self) -> None:
        """Abort and close whatever another program has left. Raises Broken: something stays."""
        self._resume(Resume())
        self._engine.abort_request([*self._engine.output_processor.external_req_ids])
        scheduler = self._core.scheduler
        snapshots = scheduler.snapshots
        for ticket in [*snapshots._loads]:
            snapshots.abort(ticket)
        for ticket in [*snapshots._held]:
            snapshots.release(ticket)
        snapshots._described.clear()
        # These make no other program fail.
        scheduler.store._failed.clear()
        scheduler.store.duplicates.clear()
        self._close_all()

    def _close_all(self) -> None:
        """Close all sessions. Raises Broken: something is left then."""
        for session in TENANTS:
            self.operation("close", session)
        for _ in range(MAX_IDLE_STEPS):
            if not self._is_busy():
                break
            self._step()
        self.check()
        self._keepings.forget()
        if self._keeps_hidden:
            self._check_worker()
        invariants.check_nothing_is_left(self._core.scheduler)
        if self._engine.output_processor.request_states:
            raise Broken("left at the end: requests of the front end")

    def _check_worker(self) -> None:
        """Workers are told with the next step what they need no longer."""
        self._ordinary(Ordinary("last", (0, 1)))
        self._settle(Settle())
        self._step()
        worker = self._core.model_executor.driver_worker.worker
        if num_bytes := worker.model_runner.partial_runs.memory.num_bytes:
            raise Broken("left at the end: hidden states in the worker", num_bytes)


def _params(made: Made) -> Any:
    """Raises ChoreoError: no call can have these."""
    from vllm_choreo.semantics.params import ChoreoParams

    call, session = made.call, made.call.session
    offsets = [read.offset for read in call.reads]
    return ChoreoParams(
        parents=tuple((f"{session}/{r.name}", r.start, r.stop) for r in call.reads),
        offsets=tuple(offsets) if any(offset is not None for offset in offsets) else None,
        new_offset=call.new_offset,
        save_as=made.id,
        kind="decode" if made.is_decode else "prefill",
        session=session,
        tenant=TENANTS[session],
        open_end=bool(call.stop),
        exact=call.exact,
        deny=tuple(f"{session}/{name}" for name in call.deny),
        copy_of=call.copy_of and f"{session}/{call.copy_of}",
        repair=call.repair,
        keep_hidden=call.keep,
    )


def _sampling(call: Call) -> Any:
    from vllm import SamplingParams

    if not call.generate:
        return SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=call.scores
        )
    return SamplingParams(
        max_tokens=call.generate,
        temperature=0.0 if call.seed is None else 1.0,
        seed=call.seed,
        stop=list(call.stop) or None,
        stop_token_ids=list(range(3, 3 + call.stop_ids)) or None,
        detokenize=bool(call.stop),
        logprobs=2,
        prompt_logprobs=call.scores,
        ignore_eos=True,
    )
