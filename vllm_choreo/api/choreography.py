# SPDX-License-Identifier: Apache-2.0
"""`Choreography`: prefill, decode and free messages on a `vllm.LLM`.

    with Choreography(llm) as c:
        doc = c.prefill("…")
        answer = c.decode("Assistant:", parents=[doc])

One call is one vLLM request. The facade adds the requests and steps the engine itself, for only so
does it see when each first token arrives (`LLM.generate` returns when all is done).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from vllm_choreo.api import baseline
from vllm_choreo.api.session import CALL_MODES, Session
from vllm_choreo.errors import ChoreoError, error_from_report
from vllm_choreo.semantics.message import (
    Call,
    Message,
    Outcome,
    message_from,
    metrics_of,
    report_of,
)

MODES = (*CALL_MODES, "baseline")
DEFAULT_PIN_SECONDS = 600.0

Report = Mapping[str, Any] | ChoreoError


class Choreography:
    """A tenant's session on an engine; closing it frees its messages.

    Args:
        llm: the `vllm.LLM`, with nothing enqueued.
        mode: "choreo"; "exact": every result is that of an ordinary request on the concatenated
            text; or "baseline": the same program as text over vLLM's prefix caching.
        tenant: to whom the session belongs; identical messages of one tenant are encoded once.

    `tokens` and `header` are text or token ids; text is tokenised without special tokens added.
    A list of dicts (keys `tokens` or `header`, `parents`, `offsets`, `new_offset`,
    `sampling_params`, `save_as`, `mode`, `deny`) runs in parallel and returns a list of messages in
    its order. If one of its items is illegal, all are refused and nothing is submitted. If one
    fails inside the engine, the others complete, and the error's `results` holds what each call
    came to: the completed messages live on until they are freed or the session is closed.

    A parent is a `Message`, an id, a `save_as` name, or `(message, start, stop)`.
    """

    def __init__(self, llm: Any, mode: str = "choreo", *, tenant: str = "") -> None:
        check_mode(mode)
        self.mode = mode
        self._llm = llm
        self._session = Session(llm.get_tokenizer(), llm.model_config, mode, tenant)
        self._entries = self._session.entries
        self._denied: tuple[str, ...] = ()

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session.id

    def prefill(
        self,
        tokens: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Any:
        """Encode a message, or a list of them; sample nothing.

        Args:
            tokens: text, token ids, or a list of dicts.
            parents: the messages that the new one attends to.
            offsets: the position at which each parent is seen; omitted: one after the other from 0.
            new_offset: the position of the first new token; omitted: after the last parent.
            save_as: a name for the message; its id is `session/name`.
            mode: "choreo" or "exact"; omitted: that of the session.
            deny: messages of which the call may read no trace (docs/exactness.md).

        Returns:
            A `Message`, or a list of them.

        Raises:
            DeniedMessageError: a parent carries traces of a message that is denied.
            ChoreoError: which parameter is wrong, and what to do instead.
        """
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        return self._run("prefill", tokens, shared)

    def decode(
        self,
        header: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        sampling_params: Any = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Any:
        """Encode a header and generate after it; the message is both. Or run a list of such calls.

        Otherwise as `prefill`. `header` must not be empty. `sampling_params` are
        `vllm.SamplingParams`, the model's defaults if omitted; with a list, they and `mode` are
        those of the items that have none of their own, and `deny` is added to that of each.
        """
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        return self._run("decode", header, {**shared, "sampling_params": sampling_params})

    def reencode(
        self,
        message: Any,
        *,
        parents: Sequence[Any] | None = None,
        offsets: Sequence[int] | None = None,
        new_offset: int | None = None,
        save_as: str | None = None,
        mode: str | None = None,
        deny: Sequence[Any] | None = None,
    ) -> Message:
        """Encode the tokens of a message anew, with parents of your choice: a clean copy.

        The copy carries traces of these parents, and of the text of `message`; none of what
        `message` was encoded with. `message` may be `(message, start, stop)`. Otherwise as
        `prefill`.
        """
        shared = _shared(parents, offsets, new_offset, save_as, mode, deny)
        clean: Message = self._run("prefill", None, {**shared, "copy_of": message})
        return clean

    def deny(self, *messages: Any) -> Choreography:
        """The same session under a policy: no call through what is returned reads their traces.

        Messages, calls and memory are shared with this one, which keeps its own policy; closing
        one closes the session.
        """
        view = copy.copy(self)
        view._denied = (*self._denied, *self._entries.denied(messages))
        return view

    def free(self, *messages: Any) -> None:
        """Free messages; a later call that names one is refused."""
        ids = self._ids(messages)
        self._utility("free", self._session.id, ids)
        self._entries.freed(ids)

    def evict(self, *messages: Any) -> None:
        """Drop cached keys and values; a later call encodes the messages again from their recipes.

        In baseline mode there is nothing to drop: `llm.reset_prefix_cache()` empties vLLM's cache.
        """
        self._utility("evict", self._session.id, self._ids(messages))

    def pin(self, *messages: Any, ttl: float = DEFAULT_PIN_SECONDS) -> None:
        """Evict these messages after all others that nobody reads, for `ttl` seconds.

        Raises:
            LimitError: pinned messages would hold more of the KV cache than
                `additional_config.choreo.pinned_share`.
        """
        self._utility("pin", self._session.id, self._ids(messages), check_ttl(ttl))

    def unpin(self, *messages: Any) -> None:
        """Take pins back; messages without one are left as they are."""
        self._utility("unpin", self._session.id, self._ids(messages))

    def message(self, named: Any) -> Message:
        """A complete message by its id or name."""
        return self._entries.complete("message", named)

    def stats(self) -> dict[str, Any]:
        """The engine's numbers on this session's messages; in baseline mode those of the client."""
        if self.mode == "baseline":
            return client_stats(self._session)
        stats: dict[str, Any] = self._utility("stats", self._session.id)
        return stats

    def close(self) -> None:
        """Free all messages of the session. Closing twice does nothing."""
        if self._entries.close():
            self._utility("close", self._session.id)

    def __enter__(self) -> Choreography:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- running calls -----------------------------------------------------------------------

    def _run(self, kind: str, tokens: Any, shared: dict[str, Any]) -> Any:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ChoreoError(
                "other requests are enqueued, and their outputs would be lost: call "
                "llm.wait_for_completion() first",
                parameter="llm",
            )
        calls, many = self._session.plan(kind, tokens, shared, self._denied)
        try:
            results = self._results(calls)
        except BaseException:
            for call in calls:
                self._entries.finished(call, ChoreoError("the call was interrupted"))
            raise
        for call, result in zip(calls, results, strict=True):
            self._entries.finished(call, result)
        raise_first_error(results)
        return results if many else results[0]

    def _results(self, calls: Sequence[Call]) -> list[Message | ChoreoError]:
        start = time.perf_counter()
        if self.mode == "baseline":
            return self._baseline_results(calls, start)
        outcomes = self._generate([(call, call.token_ids) for call in calls], start)
        return [
            choreo_result(call, outcome, self._report(call, outcome))
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    def _report(self, call: Call, outcome: Outcome) -> Report:
        """What the engine says of a finished call."""
        if not ends_here(call, outcome):
            return report_of(outcome)
        return end_report(self._utility("end", *end_arguments(call, outcome)))

    def _baseline_results(self, calls: Sequence[Call], start: float) -> list[Message | ChoreoError]:
        messages = self._entries.messages()
        if not calls[0].is_decode:
            return [baseline.stored_message(call, messages, start) for call in calls]
        prompts = [(call, baseline.prompt_token_ids(call, messages)) for call in calls]
        outcomes = self._generate(prompts, start)
        return [baseline_result(*pair) for pair in zip(calls, outcomes, strict=True)]

    def _generate(
        self, requests: Sequence[tuple[Call, Sequence[int]]], start: float
    ) -> list[Outcome]:
        """Run `(call, prompt token ids)` in one batch, until all of them are finished."""
        engine = self._llm.llm_engine
        first: dict[str, float] = {}
        outcomes: dict[str, Outcome] = {}
        try:
            for call, prompt in requests:
                engine.add_request(call.id, engine_prompt(prompt), engine_params(call, self.mode))
            while len(outcomes) < len(requests):
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    first.setdefault(output.request_id, now)
                    if output.finished:
                        metrics = metrics_of(output, start, first[output.request_id], now)
                        outcomes[output.request_id] = Outcome(output, metrics)
        except BaseException:
            # Ctrl-C, or a request that vLLM refuses: leave nothing behind in the engine.
            engine.abort_request([call.id for call, _ in requests])
            raise
        return [outcomes[call.id] for call, _ in requests]

    def _ids(self, messages: Sequence[Any]) -> list[str]:
        return [self._entries.complete("messages", message).id for message in messages]

    def _utility(self, operation: str, *args: Any) -> Any:
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call

        return checked_answer(call(self._llm, operation, *args))


# -- shared with AsyncChoreography ---------------------------------------------------------------


def check_ttl(ttl: Any) -> float:
    """Raises ChoreoError: no number of seconds above 0."""
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < float("inf"):
        raise ChoreoError("a number of seconds above 0 is needed", parameter="ttl", value=ttl)
    return float(ttl)


def checked_answer(answer: Any) -> Any:
    """The answer of an engine operation, or the error that it reports."""
    if isinstance(answer, Mapping) and "choreo_error" in answer:
        raise error_from_report(answer["choreo_error"])
    return answer


def check_mode(mode: str) -> None:
    """Raises ChoreoError: no such mode."""
    if mode not in MODES:
        raise ChoreoError(f"mode must be one of {MODES}", parameter="mode", value=mode)


def _shared(
    parents: Any, offsets: Any, new_offset: Any, save_as: Any, mode: Any, deny: Any
) -> dict[str, Any]:
    return {
        "parents": parents,
        "offsets": offsets,
        "new_offset": new_offset,
        "save_as": save_as,
        "mode": mode,
        "deny": deny,
    }


def engine_prompt(token_ids: Sequence[int]) -> Any:
    """The prompt of a request as vLLM's input processor takes it, without tokenising again."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids))


def engine_params(call: Call, mode: str) -> Any:
    """The sampling parameters of a request: the caller's, and what the engine must be told."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if call.is_decode:
        params = call.sampling_params.clone()
    else:
        # vLLM samples one token after every prompt; nobody reads it.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    # An output per step, so that the first token can be timed.
    params.output_kind = RequestOutputKind.CUMULATIVE
    return params if mode == "baseline" else call.params.apply(params)


def choreo_result(call: Call, outcome: Outcome, report: Report) -> Message | ChoreoError:
    """What a choreographed call came to."""
    return report if isinstance(report, ChoreoError) else message_from(call, outcome, report)


def ends_here(call: Call, outcome: Outcome) -> bool:
    """Whether the engine has to be told where the message ends: see `ChoreoParams.open_end`."""
    params = outcome.output.kv_transfer_params or {}
    reason = outcome.output.outputs[0].finish_reason
    return (
        call.params.open_end and "choreo_error" not in params and reason not in ("abort", "error")
    )


def end_arguments(call: Call, outcome: Outcome | None) -> tuple[str, str, int]:
    """Of the operation "end"; without an outcome nothing is kept."""
    generated = outcome.output.outputs[0].token_ids if outcome else ()
    return call.params.session, call.id, len(call.token_ids) + len(generated) if outcome else 0


def end_report(report: Mapping[str, Any] | None) -> Report:
    """The answer to "end" as a report."""
    return (
        report if report is not None else ChoreoError("the call was ended before it was complete")
    )


def baseline_result(call: Call, outcome: Outcome) -> Message | ChoreoError:
    """What a baseline call came to."""
    reason = outcome.output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        return ChoreoError(f"the engine ended the call: {reason}", parameter="finish_reason")
    return message_from(call, outcome, baseline.report(call, outcome))


def raise_first_error(results: Sequence[Message | ChoreoError]) -> None:
    """Raise the first error among `results`, and give it all of them."""
    for result in results:
        if isinstance(result, ChoreoError):
            result.results = list(results)
            raise result


def client_stats(session: Session) -> dict[str, Any]:
    """What the client itself knows of a session: `messages` and their `tokens`."""
    messages = session.entries.messages().values()
    return {"messages": len(messages), "tokens": sum(m.num_tokens for m in messages)}
