# SPDX-License-Identifier: Apache-2.0
"""From a planned call to vLLM's request, and from the engine's answer to the message.

Both facades in process, `Choreography` and `AsyncChoreography`, share these; none of them does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_choreo.api import baseline
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.errors import ChoreoError, error_from_report
from vllm_choreo.semantics.call import Result, ended
from vllm_choreo.semantics.message import Message, Metrics, TokenLogprob, Usage

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs.engine import TokensInput

    from vllm_choreo.api.picture_prompts import Prompt

# The engine's report on a finished call: its numbers, or why it was refused.
Report = Mapping[str, Any] | ChoreoError
_T = TypeVar("_T")


@dataclass(frozen=True)
class Outcome:
    """The last `RequestOutput` of a call and its times."""

    output: RequestOutput
    metrics: Metrics


# -- to the engine -------------------------------------------------------------------------------


def call_prompt(call: PlannedCall) -> Prompt:
    """The prompt of a call's request: its new tokens, with the pictures among them."""
    return call.prompt or engine_prompt(call.token_ids)


def engine_prompt(token_ids: Sequence[int], cache_salt: str | None = None) -> TokensInput:
    """The prompt of a request as vLLM's input processor takes it, without tokenising again.

    Args:
        cache_salt: salt of vLLM's prefix cache: only requests of the same salt share blocks.
    """
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=cache_salt)


def engine_params(call: PlannedCall, mode: str) -> SamplingParams:
    """The sampling parameters of a request: the caller's, and what the engine must be told."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if call.sampling_params is not None:
        params = call.sampling_params.clone()
    else:
        # vLLM samples one token after every prompt; nobody reads it.
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    # An output per step, so that the first token can be timed.
    params.output_kind = RequestOutputKind.CUMULATIVE
    return params if mode == "baseline" else call.params.apply(params)


def end_arguments(call: PlannedCall, outcome: Outcome | None) -> tuple[str, str, int]:
    """Arguments of the engine's operation "end"; without an outcome nothing is kept."""
    generated = outcome.output.outputs[0].token_ids if outcome else ()
    return call.params.session, call.id, len(call.token_ids) + len(generated) if outcome else 0


def check_ttl(ttl: object) -> float:
    """Return `ttl` as a float. Raises ChoreoError: no number of seconds above 0."""
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl < float("inf"):
        raise ChoreoError("a number of seconds above 0 is needed", parameter="ttl", value=ttl)
    return float(ttl)


# -- from the engine -----------------------------------------------------------------------------


def checked_answer(answer: _T) -> _T:
    """The answer of an engine operation, or the error that it reports."""
    if isinstance(answer, Mapping) and "choreo_error" in answer:
        raise error_from_report(answer["choreo_error"])
    return answer


def metrics_of(output: RequestOutput, submitted: float, first: float, now: float) -> Metrics:
    """The times of a call.

    Args:
        output: its latest `RequestOutput`.
        submitted, first, now: times of its submission, of its first output and of this one, in
            seconds on the clock of `time.perf_counter`.
    """
    # The engine core's stamps are `time.monotonic`: on Linux the clock of `time.perf_counter`, in
    # every process.
    scheduled = output.metrics.scheduled_ts if output.metrics is not None else 0.0
    return Metrics(
        submitted=submitted,
        waiting=max(0.0, scheduled - submitted) if scheduled else None,
        ttft=first - submitted,
        latency=now - submitted,
    )


def report_of(outcome: Outcome) -> Report:
    """The engine's report on a finished call: its numbers, or why it was refused."""
    params = outcome.output.kv_transfer_params or {}
    if "choreo_error" in params:
        return error_from_report(params["choreo_error"])
    if "choreo" in params:
        report: Mapping[str, Any] = params["choreo"]
        return report
    reason = outcome.output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        return ChoreoError(f"the engine ended the call: {reason}", parameter="finish_reason")
    return ChoreoError(
        "the engine does not choreograph: start it with the vllm_choreo plugin "
        "(see the README), or use mode='baseline'",
        parameter="llm",
    )


def ends_here(call: PlannedCall, outcome: Outcome) -> bool:
    """Return whether the engine must be told where the message ends (`ChoreoParams.open_end`)."""
    params = outcome.output.kv_transfer_params or {}
    reason = outcome.output.outputs[0].finish_reason
    return (
        call.params.open_end and "choreo_error" not in params and reason not in ("abort", "error")
    )


def end_report(report: Mapping[str, Any] | None) -> Report:
    """The answer to "end" as a report."""
    return report if report is not None else ended()


def choreo_result(call: PlannedCall, outcome: Outcome, report: Report) -> Result:
    """Result of a choreographed call: its message, or its error."""
    return report if isinstance(report, ChoreoError) else message_from(call, outcome, report)


def baseline_result(call: PlannedCall, outcome: Outcome) -> Result:
    """Result of a baseline call: its message, or its error."""
    reason = outcome.output.outputs[0].finish_reason
    if reason in ("abort", "error"):
        return ChoreoError(f"the engine ended the call: {reason}", parameter="finish_reason")
    return message_from(call, outcome, baseline.report(call, outcome.output))


def message_from(call: PlannedCall, outcome: Outcome, report: Mapping[str, Any]) -> Message:
    """The message that `call` made.

    Args:
        call: the call as it was planned.
        outcome: its last output, and its times.
        report: `position`, and the fields of `Usage`.
    """
    completion = outcome.output.outputs[0]
    # The one token that the engine samples after a prefill is no part of the message.
    generated = tuple(completion.token_ids) if call.is_decode else ()
    generated_text = completion.text if call.is_decode else ""
    token_ids = (*call.token_ids, *generated)
    return Message(
        id=call.id,
        text=call.text + generated_text,
        token_ids=token_ids,
        num_tokens=len(token_ids),
        position=report["position"],
        parents=call.params.parents,
        generated_text=generated_text,
        generated_token_ids=generated,
        logprobs=completion.logprobs if call.is_decode else None,
        finish_reason=completion.finish_reason if call.is_decode else None,
        usage=Usage.of(report),
        metrics=outcome.metrics,
        trace=call.trace,
        offsets=call.params.offsets,
        new_offset=call.params.new_offset,
        role=call.role,
        prompt_logprobs=_header_logprobs(outcome.output, len(call.token_ids)),
        num_pictures=call.num_pictures,
    )


def _header_logprobs(
    output: RequestOutput, num_tokens: int
) -> list[Mapping[int, TokenLogprob] | None] | None:
    """Logprobs of a header's tokens; behind text, as in a baseline call, that has none before."""
    if output.prompt_logprobs is None:
        return None
    return [None, *output.prompt_logprobs[-num_tokens:][1:]]
