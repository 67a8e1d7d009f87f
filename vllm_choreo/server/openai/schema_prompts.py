# SPDX-License-Identifier: Apache-2.0
"""`choreo_schema` in `vllm_xargs`: the text of a request is a prompt of that schema."""

from __future__ import annotations

from functools import partial
from typing import Any
from xml.sax.saxutils import quoteattr

from vllm_choreo.errors import ChoreoError, PmlError, UnsupportedOptionError
from vllm_choreo.pml.markup import parse_prompt
from vllm_choreo.pml.tree import Prompt
from vllm_choreo.server.openai.reading import Body
from vllm_choreo.server.running import Run
from vllm_choreo.server.session_prompts import PromptCalls, SessionPrompts

# Of a request with a schema, the schema says these.
_NOT_BESIDE = ("parents", "offsets", "new_offset", "prefix")
_OPTIONS = ("layout", "mode", "repair", "deny")


async def begin_prompt(
    run: Run, prompts: SessionPrompts, body: Body, arguments: dict[str, Any], adapter: object
) -> PromptCalls | None:
    """Submit the calls of a prompt before its last one; None: the request names no schema.

    Args:
        run: calls of the request.
        prompts: prompts of its session.
        body: body of the request.
        arguments: arguments of its decode; they become those of the prompt's last call.
        adapter: adapter that its calls wear where it is placed.

    Raises:
        ChoreoError: the prompt is illegal.
    """
    name, layout = arguments.pop("schema", None), arguments.pop("layout", None)
    if name is None:
        if layout is not None:
            raise ChoreoError("a layout is that of a prompt's schema", parameter="layout")
        return None
    for other in _NOT_BESIDE:
        if other in arguments:
            raise UnsupportedOptionError(
                "the schema says what a prompt reads and where: leave this out",
                parameter=other,
                value="given",
            )
    options = {key: arguments.pop(key, None) for key in _OPTIONS} | {"layout": layout}
    options["adapter"] = adapter
    read = partial(prompt_of, _text(body), name)
    calls = await prompts.calls(read, options, run.sessions.config.max_calls_per_request)
    # The last call takes its adapter from the request.
    arguments.update({key: value for key, value in calls.options.items() if key != "adapter"})
    if calls.pieces:
        await run.submit(calls.pieces)
    return calls


def prompt_of(text: str, schema: object) -> Prompt:
    """The prompt of a text: a whole `<prompt>`, or what stands inside it.

    Raises:
        PmlError: it is none, or of another schema.
    """
    if not isinstance(schema, str):
        raise PmlError("a schema is named by a string", parameter="schema", value=schema)
    if not text.lstrip().startswith("<prompt"):
        text = f"<prompt schema={quoteattr(schema)}>{text}</prompt>"
    prompt = parse_prompt(text)
    if prompt.schema != schema:
        raise PmlError("the prompt is of another schema", parameter="schema", value=prompt.schema)
    return prompt


def _text(body: Body) -> str:
    """The text of a completion's prompt, or of a chat's one message.

    Raises:
        PmlError: there is no such text.
    """
    messages = getattr(body, "messages", None)
    if messages is None:
        text = body.prompt
    else:
        is_one = len(messages) == 1 and messages[0]["role"] == "user"
        text = messages[0].get("content") if is_one else None
    if not isinstance(text, str):
        raise PmlError(
            "with choreo_schema the prompt is text, and a chat is one message of the user, whose "
            "content is the prompt",
            parameter="prompt",
        )
    return text
