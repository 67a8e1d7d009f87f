# SPDX-License-Identifier: Apache-2.0
"""Runs programs on an engine in this process, one step at a time, and judges what comes."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.feature_machine import invariants
from tests.engine.feature_machine.configurations import Configuration, scheduling_of
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.ledger import Ledger, Limits, Made, is_exact
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
from tests.engine.feature_machine.truth import Truth
from tests.engine.oracle import Parent
from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.rules import AllTokens, ByAttention, ByLayers, Reweighted, Seen

# Steps without an answer. What a call reads and what that was made of takes some dozens.
MAX_IDLE_STEPS = 300
_WINDOW = 1e9  # seconds of a pin


@dataclass
class Machine:
    """An engine for programs of one configuration, and what is true of its models.

    Attributes:
        llm: vLLM's.
        adapters: vLLM's requests for them, by number from 1.
        counts: what happened in all programs.
    """

    configuration: Configuration
    llm: Any
    truth: Truth
    adapters: Sequence[Any] = ()
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def run(self, operations: Iterable[Operation]) -> None:
        """Run a program and check all of it. Raises AssertionError, or what the engine raised."""
        self.counts["programs"] += 1
        self.truth.clear()
        _Run(self).run(operations)

    def recover(self) -> bool:
        """After a program that failed: whether the engine is as new when all has been given up."""
        try:
            _Run(self).give_up()
        except Exception:
            return False
        return True

    def stop(self) -> None:
        """Shut the engine down now: vLLM's process groups are global."""
        self.llm.llm_engine.engine_core.shutdown()
        gc.collect()


def start_machine(
    configuration: Configuration, model_path: Path, oracle: Callable[[Path], Any], folder: Path
) -> Machine:
    """
    Args:
        model_path: of the configuration's model.
        oracle: makes that of a model.
        folder: for adapters.
    """
    from tests.engine.adapters import Adapter
    from tests.engine.conftest import start_engine

    torch.set_num_threads(1)
    adapters = []
    for number in range(1, configuration.num_adapters + 1):
        adapters.append(Adapter(model_path, Path(tempfile.mkdtemp(dir=folder)), number))
    oracles = [oracle(model_path), *(adapter.oracle for adapter in adapters)]
    with scheduling_of(configuration):
        llm = start_engine(model_path, **configuration.engine_options())
    truth = Truth(oracles, configuration.engine_options()["block_size"])
    return Machine(configuration, llm, truth, [adapter.request for adapter in adapters])


@dataclass(eq=False)
class _Keeping:
    """A save or a load that is under way: a generator that asks the engine.

    Attributes:
        steps: see `keep/steps.py`.
        answer: what it is told next.
        waits_for: a call that has messages encoded for it.
        done: told what it came to: a result, or an error.
    """

    steps: Any
    session: str
    done: Callable[[Any], None]
    answer: Any = None
    waits_for: Made | None = None


class _Run:
    """One program."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._llm = machine.llm
        self._engine = machine.llm.llm_engine
        configuration = machine.configuration
        self._ledger = Ledger(
            Limits(
                configuration.num_blocks - 1,
                configuration.max_model_len,
                configuration.hidden_bytes,
                128 * 4,
                2 if "drafts" in configuration else 1,
            )
        )
        self._running: dict[str, Made | Ordinary] = {}  # by request
        self._ends: list[tuple[int, Made]] = []  # at which step the client tells
        self._keepings: list[_Keeping] = []
        self._kept: dict[str, dict[str, Made]] = {}  # what a key holds, by name
        self._tenant_of_key: dict[str, str] = {}
        self._answers: list[tuple[Ordinary, Any]] = []
        self._num_steps = 0
        self._num_calls = 0
        self._closed = Counter[str]()

    def run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            getattr(self, f"_{type(operation).__name__.lower()}")(operation)
            self._check()
        self._resume(Resume())
        self._settle(Settle())
        self._judge()
        self._close_all()

    # -- operations ------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        if not self._is_possible(call):
            return
        self._machine.counts["calls"] += 1
        made = self._ledger.open(call)
        self._submit(made, list(call.tokens))

    def _is_possible(self, call: Call) -> bool:
        """Whether a client could make this call: it must know the tokens that it copies."""
        if call.copy_of is None:
            return True
        origin = self._ledger.find(call.session, call.copy_of)
        return origin is None or origin.tokens is not None

    def _submit(self, made: Made, tokens: list[int]) -> None:
        from vllm_choreo.api.outcomes import engine_prompt

        call, request_id = made.call, made.id
        if made.id in self._running:  # a second request of that id
            self._num_calls += 1
            request_id = f"{made.id}#{self._num_calls}"
        try:
            params = self._params(made).apply(self._sampling(call))
            self._engine.add_request(
                request_id,
                engine_prompt(tokens),
                params,
                lora_request=self._adapter(call.adapter),
                priority=call.priority,
            )
        except ValueError as error:
            self._ended(made, error)
            if isinstance(error, ChoreoError):
                return
            # vLLM's own: a prompt that is too long.
            made.error = "TooLongError"
            return
        self._running[request_id] = made
        if not made.must and self._message_of(made) is not None:
            self._ledger.enter(made)

    def _params(self, made: Made) -> Any:
        from vllm_choreo.semantics.params import ChoreoParams

        call, session = made.call, made.call.session
        offsets = [read.offset for read in call.reads]
        return ChoreoParams(
            parents=tuple((f"{session}/{r.name}", r.start, r.stop) for r in call.reads),
            offsets=tuple(offsets) if any(o is not None for o in offsets) else None,
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

    def _sampling(self, call: Call) -> Any:
        from vllm import SamplingParams

        if not call.generate:
            return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        return SamplingParams(
            max_tokens=call.generate,
            temperature=0.0 if call.seed is None else 1.0,
            seed=call.seed,
            stop=list(call.stop) or None,
            stop_token_ids=list(range(3, 3 + call.stop_ids)) or None,
            detokenize=bool(call.stop),
            logprobs=2,
            ignore_eos=True,
        )

    def _adapter(self, number: int) -> Any:
        return self._machine.adapters[number - 1] if number else None

    def _ordinary(self, ordinary: Ordinary) -> None:
        from vllm import SamplingParams

        from vllm_choreo.api.outcomes import engine_prompt

        if ordinary.name in self._running:
            return
        self._machine.counts["ordinary"] += 1
        params = SamplingParams(
            max_tokens=ordinary.generate,
            temperature=0.0,
            detokenize=False,
            logprobs=2,
            ignore_eos=True,
        )
        self._engine.add_request(
            ordinary.name,
            engine_prompt(list(ordinary.tokens)),
            params,
            lora_request=self._adapter(ordinary.adapter),
            priority=ordinary.priority,
        )
        self._running[ordinary.name] = ordinary

    def _steps(self, steps: Steps) -> None:
        for _ in range(steps.count):
            self._step()

    def _settle(self, settle: Settle) -> None:
        """Until everything is answered. Raises Broken: that takes too long."""
        idle = 0
        while self._running or self._keepings or self._ends or self._is_busy():
            if self._is_paused():
                return
            before = self._progress()
            self._advance(2)
            self._step()
            idle = idle + 1 if self._progress() == before else 0
            if idle > MAX_IDLE_STEPS:
                waiting = [*self._running, *(k.session for k in self._keepings)]
                raise Broken("nothing is answered any more", waiting)

    def _progress(self) -> Any:
        return len(self._running), len(self._keepings), len(self._ends), self._num_calls

    def _is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests() or self._machine.core.batch_queue)

    def _is_paused(self) -> bool:
        return bool(self._machine.core.is_scheduler_paused())

    def _free(self, free: Free) -> None:
        names = [f"{free.session}/{name}" for name in free.names]
        self._utility("free", free.session, names)
        self._ledger.free(free.session, free.names)

    def _evict(self, evict: Evict) -> None:
        self._named("evict", evict.session, evict.names)

    def _pin(self, pin: Pin) -> None:
        self._named("pin", pin.session, pin.names, _WINDOW, may={"LimitError"})

    def _unpin(self, unpin: Unpin) -> None:
        self._named("unpin", unpin.session, unpin.names)

    def _named(
        self,
        operation: str,
        session: str,
        names: Sequence[str],
        *args: Any,
        may: Iterable[str] = (),
    ) -> None:
        """An operation on messages: refused if there is one that the session does not have."""
        ids = [f"{session}/{name}" for name in names]
        answer = self._utility(operation, session, ids, *args)
        found = _error_of(answer)
        unknown = any(self._ledger.find(session, name) is None for name in names)
        if unknown != (found == "UnknownMessageError") or found not in (
            None,
            "UnknownMessageError",
            *may,
        ):
            raise Broken(f"{operation} is answered by {found}", answer)

    def _close(self, close: Close) -> None:
        self._utility("close", close.session)
        self._closed[close.session] += 1
        self._ledger.free(close.session, [*self._ledger.of_session(close.session)])

    def _abort(self, abort: Abort) -> None:
        for request_id, running in list(self._running.items()):
            if (running if isinstance(running, Ordinary) else running.call).name == abort.name:
                self._engine.abort_request([request_id])
                del self._running[request_id]
                self._machine.counts["aborted"] += 1
                if isinstance(running, Made):
                    self._aborted(running)

    def _aborted(self, made: Made) -> None:
        made.is_aborted = True
        if made.call.stop:
            self._utility("end", made.call.session, made.id, 0)
        made.state = "failed"
        message = self._message_of(made)
        # It may have been complete before its answer went out.
        if message is not None and not message.failure and made.tokens is not None:
            made.state = "made"

    def _pause(self, pause: Pause) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if pause.drain:
            self._machine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        else:
            self._machine.core.pause_scheduler(mode="keep", clear_cache=False)

    def _resume(self, resume: Resume) -> None:
        self._machine.core.resume_scheduler()

    def _reset(self, reset: Reset) -> None:
        self._llm.reset_prefix_cache()

    # -- saves and loads -------------------------------------------------------------------

    def _save(self, save: Save) -> None:
        from vllm_choreo.keep.saving import saving

        made = {name: self._ledger.find(save.session, name) for name in save.names}
        chosen = {name: one for name, one in made.items() if one is not None}
        if not chosen or any(one.state != "made" for one in chosen.values()):
            return  # a client saves what is complete
        self._machine.counts["saves"] += 1
        messages = [_message(one) for one in chosen.values()]
        folder, origin = self._folder(save.key), self._origin(save.session)
        before = self._kept.pop(save.key, None)

        def done(result: Any) -> None:
            if not isinstance(result, BaseException):
                self._kept[save.key] = chosen
                self._tenant_of_key[save.key] = TENANTS[save.session]
                return
            if before is not None:
                self._kept[save.key] = before
            error = type(result).__name__
            gone = any(one.freed for one in chosen.values())
            may = {"PoolFullError"} | ({"UnknownMessageError"} if gone else set())
            if error not in may:
                raise result

        steps = saving(messages, folder, origin, save.encodings, False)
        self._begin(_Keeping(steps, save.session, done), save.asks)

    def _load(self, load: Load) -> None:
        from vllm_choreo.keep.loading import loading

        self._machine.counts["loads"] += 1
        kept = self._kept.get(load.key)
        tenant, closed = TENANTS[load.session], self._closed[load.session]
        is_own = kept is not None and self._tenant_of_key[load.key] == tenant
        sources = {f"{name}{load.suffix}": made for name, made in (kept or {}).items()}
        loaded = self._ledger.load(sources, load.session) if is_own else []
        taken: list[str] = []

        def admit(messages: Sequence[Any]) -> None:
            if self._closed[load.session] != closed:
                raise ChoreoError("the session was closed", parameter="session")
            for made in loaded:
                existing = self._ledger.find(load.session, made.call.name)
                if existing is not None and existing.state != "failed":
                    taken.append(made.id)

        def names_of(session: str, ids: Sequence[str]) -> dict[str, str]:
            return {i: f"{load.session}/{i.partition('/')[2]}{load.suffix}" for i in ids}

        def done(result: Any) -> None:
            error = type(result).__name__ if isinstance(result, BaseException) else None
            for made in loaded:
                made.state = "failed" if error else "made"
                if not error:
                    self._ledger.enter(made)
            if error is None and (taken or not is_own):
                raise Broken("a load is not refused", load)
            expected = {"NameTakenError"} if taken else set()
            if self._closed[load.session] != closed:
                expected |= {"ChoreoError"}
            if not is_own:
                # While a key is saved anew nobody can say what is loaded.
                expected |= {"KeptError", "UnknownKeptError"}
            if any(made.call.keep for made in self._ledger.made):
                expected |= {"LimitError"}
            if error and error not in expected:
                raise result

        if any(k.session == f"save {load.key}" for k in self._keepings):
            return
        steps = loading(
            self._folder(load.key),
            self._origin(load.session),
            tenant,
            names_of,
            admit,
            "refuse",
            False,
        )
        self._begin(_Keeping(steps, load.session, done), load.asks)

    def _asks(self, asks: Asks) -> None:
        self._advance(asks.count)

    def _begin(self, keeping: _Keeping, asks: int) -> None:
        self._keepings.append(keeping)
        self._advance_one(keeping, asks)

    def _advance(self, asks: int) -> None:
        for keeping in list(self._keepings):
            self._advance_one(keeping, asks)

    def _advance_one(self, keeping: _Keeping, asks: int) -> None:
        for _ in range(asks):
            if keeping not in self._keepings or keeping.waits_for is not None:
                return
            self._num_calls += 1  # it goes on
            try:
                if isinstance(keeping.answer, BaseException):
                    ask = keeping.steps.throw(keeping.answer)
                else:
                    ask = keeping.steps.send(keeping.answer)
            except StopIteration as stop:
                self._keepings.remove(keeping)
                keeping.done(stop.value)
                return
            except (ChoreoError, OSError) as error:
                self._keepings.remove(keeping)
                keeping.done(error)
                return
            keeping.answer = self._told(keeping, ask)
            self._check()

    def _told(self, keeping: _Keeping, ask: Any) -> Any:
        """What an ask is answered with; of one that takes steps, later."""
        from vllm_choreo.api.outcomes import checked_answer
        from vllm_choreo.engine.utility import of_workers

        try:
            if ask.what == "operation":
                return checked_answer(self._utility(*ask.args))
            if ask.what == "workers":
                return of_workers(self._llm, *ask.args)
        except ChoreoError as error:
            return error
        from tests.engine.feature_machine.program import Read

        session = keeping.session
        names = [message_id.partition("/")[2] for message_id in ask.args]
        call = Call(session, f"~{self._num_calls}", (0, 1), tuple(map(Read, names)))
        made = self._ledger.open(call)
        keeping.waits_for = made
        self._submit(made, list(call.tokens))
        return None

    def _encoded_for(self, made: Made) -> None:
        """A save waited for this call."""
        for keeping in self._keepings:
            if keeping.waits_for is made:
                keeping.waits_for = None
                if made.error is None:
                    self._free(Free(made.call.session, (made.call.name,)))
                else:
                    keeping.answer = _as_error(made)

    def _folder(self, key: str) -> Any:
        from vllm_choreo.keep.storage import KeptFolder

        return KeptFolder(f"memory://feature-machine-{id(self)}/{key}")

    def _origin(self, session: str) -> Any:
        from vllm_choreo.keep.manifest import tenant_digest
        from vllm_choreo.keep.origin import Origin

        model = self._engine.vllm_config.model_config
        return Origin(
            session,
            tenant_digest(TENANTS[session]),
            _signature(self._engine.vllm_config),
            1,
            model.get_total_num_kv_heads(),
            model.get_vocab_size(),
        )

    # -- the engine ------------------------------------------------------------------------

    def _utility(self, operation: str, *args: Any) -> Any:
        from vllm_choreo.engine.utility import call

        return call(self._llm, operation, *args)

    def _message_of(self, made: Made) -> Any:
        """The engine's message of that name, whoever's it is."""
        return self._machine.scheduler.store.find(made.call.session, made.id)

    def _step(self) -> None:
        self._machine.counts["steps"] += 1
        self._num_steps += 1
        for output in self._engine.step():
            if output.finished:
                self._answer(output)
        for end in [end for end in self._ends if end[0] <= self._num_steps]:
            self._ends.remove(end)
            self._end(end[1])
        self._check()

    def _check(self) -> None:
        invariants.check(self._machine.scheduler)

    def _answer(self, output: Any) -> None:
        answered = self._running.pop(output.request_id)
        if isinstance(answered, Ordinary):
            self._answers.append((answered, output))
            return
        answered.answer = output
        report = output.kv_transfer_params or {}
        reason = output.outputs[0].finish_reason
        if "choreo_error" in report:
            self._ended(answered, report["choreo_error"]["type"])
        elif reason in ("abort", "error"):
            self._ended(answered, reason)
        elif answered.call.stop:
            answered.state = "open"
            self._ends.append((self._num_steps + answered.call.end_after, answered))
        else:
            self._complete(answered)
        self._encoded_for(answered)

    def _ended(self, made: Made, error: Any) -> None:
        made.state = "failed"
        made.error = error if isinstance(error, str) else type(error).__name__
        self._machine.counts[f"refused: {made.error}"] += 1
        if isinstance(error, BaseException):
            self._encoded_for(made)

    def _end(self, made: Made) -> None:
        generated = made.answer.outputs[0].token_ids
        count = len(made.call.tokens) + len(generated)
        self._utility("end", made.call.session, made.id, count)
        self._complete(made)

    def _complete(self, made: Made) -> None:
        made.state = "made"
        if made.is_decode:
            made.tokens = (*made.call.tokens, *made.answer.outputs[0].token_ids)

    # -- what is true ----------------------------------------------------------------------

    def _judge(self) -> None:
        for made in self._ledger.made:
            if made.state == "loading":
                continue
            is_known = self._ledger.resolve(made)
            if made.source is None:
                self._judge_end(made)
            if is_known and made.state == "made":
                self._judge_made(made)
        for ordinary, output in self._answers:
            truth = self._machine.truth.encode(
                ordinary.adapter, (*ordinary.tokens, *output.outputs[0].token_ids), (), 0
            )
            _compare(output.outputs[0], truth, len(ordinary.tokens), True, ordinary)
        self._judge_contents()

    def _judge_end(self, made: Made) -> None:
        """Whether a call was refused if and only if it had to be, by an error that it may get."""
        if made.is_aborted:
            return
        allowed = made.must | made.may
        if made.error is None and made.must:
            raise Broken(f"not refused: {sorted(made.must)}", made.call)
        if made.error is not None and made.error not in allowed:
            report = (made.answer and made.answer.kv_transfer_params) or {}
            text = report.get("choreo_error", {}).get("message", "")
            raise Broken(f"refused without need: {made.error}", f"{made.call!r} {text}")

    def _judge_made(self, made: Made) -> None:
        if made.source is not None:
            made.encoded = made.source.encoded
            return
        assert made.tokens is not None
        parents = self._read_by(made)
        if parents is None:
            self._machine.counts["cannot be judged"] += 1
            return
        weights = None
        if isinstance(made.rule, Reweighted) and len(parents) > 1:
            weights = made.rule.weights
        made.encoded = self._machine.truth.encode(
            made.call.adapter, made.tokens, parents, made.position, weights
        )
        if made.answer is None:
            return
        if made.is_decode:
            is_greedy = made.call.seed is None
            _compare(made.answer.outputs[0], made.encoded, len(made.call.tokens), is_greedy, made)
        report = (made.answer.kv_transfer_params or {}).get("choreo")
        if report and report["exact"] != is_exact(made):
            raise Broken("exact is reported wrongly", f"{made.call!r} {report}")

    def _read_by(self, made: Made) -> list[Parent] | None:
        """What a call reads; None: nobody can tell."""
        if any(parent.encoded is None for parent, _ in made.parents):
            return None
        truth, adapter, rule = self._machine.truth, made.call.adapter, made.rule
        listed = [
            Parent(parent.encoded, offset, start, stop)
            for (parent, _), (start, stop, offset) in zip(made.parents, made.spans, strict=True)
        ]
        if made.call.exact:
            return truth.exact(adapter, listed)
        if rule is None or isinstance(rule, Reweighted):
            return listed
        if isinstance(rule, ByLayers):
            if rule.ranges == ((0, truth.num_layers),):
                return truth.repaired(adapter, listed, AllTokens().runs(_seen(made), 32))
            return truth.by_layers(adapter, listed, [range(*ends) for ends in rule.ranges])
        if isinstance(rule, ByAttention):
            if not rule.share:
                return listed
            runs = truth.runs_by_attention(
                adapter,
                made.call.tokens,
                listed,
                made.position,
                rule.share,
                self._ledger.num_unchanged(made),
            )
            return None if runs is None else truth.repaired(adapter, listed, runs)
        return truth.repaired(adapter, listed, rule.runs(_seen(made), 32))

    def _judge_contents(self) -> None:
        """The keys and values of all messages that lie in the pool are those of the oracle."""
        store, truth = self._machine.scheduler.store, self._machine.truth
        runner = self._machine.core.model_executor.driver_worker.worker
        for session in TENANTS:
            for made in self._ledger.of_session(session).values():
                message = store.find(session, made.id)
                if made.encoded is None or made.state != "made" or message is None:
                    continue
                own = message.own
                if not own.is_resident:
                    continue
                count, parts = own.num_tokens, (0, 2 * truth.num_layers)
                blocks = [block.block_id for block in own.blocks]
                data = np.frombuffer(runner.choreo_read_kv(blocks, parts, 0, count), np.float32)
                found = torch.from_numpy(data.copy()).view(2 * truth.num_layers, count, -1)
                self._judge_content(made, found, own.stored_position)

    def _judge_content(self, made: Made, found: torch.Tensor, position: int) -> None:
        truth, count = self._machine.truth, found.shape[1]
        for layer in range(truth.num_layers):
            keys = truth.rotated_keys(made.encoded, layer, position)
            for part, expected in ((0, keys), (1, made.encoded.values[layer])):
                rows = expected.transpose(0, 1).reshape(count, -1)
                difference = float((found[2 * layer + part] - rows).abs().max())
                if not difference < 2e-3:
                    what = ("keys", "values")[part]
                    detail = f"{made.call!r}: {what} of layer {layer} by {difference:.1e}"
                    raise Broken("a message lies in the pool with other keys and values", detail)

    # -- the end ---------------------------------------------------------------------------

    def give_up(self) -> None:
        """Abort and close whatever another program has left. Raises Broken: something stays."""
        self._resume(Resume())
        self._engine.abort_request([*self._engine.output_processor.external_req_ids])
        scheduler = self._machine.scheduler
        keeper = scheduler.keeper
        for ticket in [*keeper._loads]:
            keeper.give_up(ticket)
        for ticket in [*keeper._held]:
            keeper.let_go(ticket)
        keeper._told.clear()
        scheduler.store._failed.clear()
        self._close_all()

    def _close_all(self) -> None:
        for session in TENANTS:
            self._utility("close", session)
        for _ in range(MAX_IDLE_STEPS):
            if not self._is_busy():
                break
            self._step()
        self._check()
        self._forget_files()
        if "hidden" in self._machine.configuration:
            self._ordinary(Ordinary("last", (0, 1)))
            while "last" in self._running:
                self._step()
            self._step()
            runs = self._machine.core.model_executor.driver_worker.worker.model_runner.partial_runs
            if runs.memory.num_bytes:
                raise Broken("left at the end: hidden states in the worker", runs.memory.num_bytes)
        invariants.check_nothing_is_left(self._machine.scheduler)
        if self._engine.output_processor.request_states:
            raise Broken("left at the end: requests of the front end")

    def _forget_files(self) -> None:
        import fsspec

        memory = fsspec.filesystem("memory")
        root = f"/feature-machine-{id(self)}"
        if memory.exists(root):
            memory.rm(root, recursive=True)


def _seen(made: Made) -> list[Seen]:
    return [Seen(start, stop) for start, stop, _ in made.spans]


def _compare(completion: Any, encoded: Any, num_header: int, is_greedy: bool, what: Any) -> None:
    """Generated tokens and their log-probabilities against the oracle's."""
    rows = encoded.logprobs()[num_header - 1 : -1]
    tokens, reported = completion.token_ids, completion.logprobs
    if not len(tokens) == len(reported) == len(rows):
        raise Broken("as many log-probabilities as tokens", what)
    for index, (token, row, entries) in enumerate(zip(tokens, rows, reported, strict=True)):
        if is_greedy and float(row.max() - row[token]) >= TIE_MARGIN:
            detail = f"token {index} is {token}, not {int(row.argmax())}: {what!r}"
            raise Broken("an answer has another token than the oracle's", detail)
        for other, entry in entries.items():
            difference = abs(float(row[other]) - entry.logprob)
            if not difference < LOGPROB_TOLERANCE:
                detail = f"token {index} by {difference:.1e}: {what!r}"
                raise Broken("an answer has other log-probabilities than the oracle's", detail)


def _error_of(answer: Any) -> str | None:
    is_error = isinstance(answer, dict) and "choreo_error" in answer
    return answer["choreo_error"]["type"] if is_error else None


def _as_error(made: Made) -> ChoreoError:
    from vllm_choreo.errors import error_from_report

    return error_from_report({"type": made.error, "message": "of a call that a save waited for"})


_signatures: dict[int, Any] = {}


def _signature(vllm_config: Any) -> Any:
    """Of an engine; its weights are digested once."""
    from vllm_choreo.keep.signature import signature

    if id(vllm_config) not in _signatures:
        _signatures[id(vllm_config)] = signature(vllm_config)
    return _signatures[id(vllm_config)]


def _message(made: Made) -> Any:
    """What a client has of a message."""
    from vllm_choreo.semantics.message import Message, Metrics, Usage

    assert made.tokens is not None
    return Message(
        id=made.id,
        text="",
        token_ids=made.tokens,
        num_tokens=len(made.tokens),
        position=made.position,
        parents=(),
        generated_text="",
        generated_token_ids=(),
        logprobs=None,
        finish_reason="length" if made.is_decode else None,
        usage=Usage(False, 0, 0, 0),
        metrics=Metrics(0.0, None, 0.0, 0.0),
    )
