# SPDX-License-Identifier: Apache-2.0
"""`mode="baseline"`: the same program as text, over vLLM's own prefix caching.

A call's prompt is the token ids of its parents, one after the other, then the header. A prefill
computes nothing, it only names the tokens; offsets are ignored, for text has none. Nothing here is
slowed down on purpose: what vLLM caches of an earlier prompt of the workflow is a hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.entries import Entries
from vllm_choreo.api.picture_prompts import concat_prompts, cut_prompt, with_tokens
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.inputs.engine import MultiModalInput

    from vllm_choreo.api.picture_prompts import Prompt


def prompt_token_ids(call: PlannedCall, messages: Mapping[str, Message]) -> list[int]:
    """The prompt of `call`: parents, sub-spans cut out, then the header."""
    prompt: list[int] = []
    for span in call.params.parents:
        prompt.extend(span_token_ids(span, messages[span.id].token_ids))
    prompt.extend(call.token_ids)
    return prompt


def prompt_of(call: PlannedCall, entries: Entries, cache_salt: str | None = None) -> Prompt:
    """The prompt of `call` as `prompt_token_ids` has it, with the pictures among its tokens.

    Args:
        entries: messages of its session.
        cache_salt: salt of vLLM's prefix cache: only requests of the same salt share blocks.

    Raises:
        SpanError: a parent is a part of a message that begins or ends inside of a picture.
    """
    messages = entries.messages()
    parts: list[Prompt] = []
    for span in call.params.parents:
        whole = _prompt(messages[span.id].token_ids, entries.pictures(span.id))
        parts.append(cut_prompt(whole, span.start, span.stop))
    parts.append(_prompt(call.token_ids, entries.shown_by(call)))
    return concat_prompts(parts, cache_salt)


def _prompt(token_ids: Sequence[int], shown: MultiModalInput | None) -> Prompt:
    from vllm.inputs.engine import tokens_input

    return with_tokens(shown, token_ids) if shown else tokens_input(list(token_ids))


def span_token_ids(span: ParentSpan, token_ids: Sequence[int]) -> Sequence[int]:
    """Token ids that a span names of a message."""
    return token_ids[span.start : span.stop]


def stored_message(call: PlannedCall, messages: Mapping[str, Message], submitted: float) -> Message:
    """The message of a prefill: nothing was computed and no time was spent."""
    return Message(
        id=call.id,
        text=call.text,
        token_ids=call.token_ids,
        num_tokens=len(call.token_ids),
        position=len(prompt_token_ids(call, messages)) - len(call.token_ids),
        parents=call.params.parents,
        generated_text="",
        generated_token_ids=(),
        logprobs=None,
        finish_reason=None,
        usage=Usage(exact=True, reused_tokens=0, repositioned_tokens=0, encoded_tokens=0),
        metrics=Metrics(submitted=submitted, waiting=None, ttft=0.0, latency=0.0),
        trace=call.trace,
        offsets=call.params.offsets,
        new_offset=call.params.new_offset,
        role=call.role,
        num_pictures=call.num_pictures,
    )


def report(call: PlannedCall, output: RequestOutput) -> dict[str, Any]:
    """Report on a `RequestOutput`, in the engine's form; prefix cache hits are `reused_tokens`."""
    num_prompt = len(output.prompt_token_ids)
    num_generated = len(output.outputs[0].token_ids)
    reused = output.num_cached_tokens or 0
    return {
        "position": num_prompt - len(call.token_ids),
        "exact": True,
        "reused_tokens": reused,
        "repositioned_tokens": 0,
        "encoded_tokens": num_prompt + num_generated - reused,
    }
