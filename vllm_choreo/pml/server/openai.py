# SPDX-License-Identifier: Apache-2.0
"""`choreo_schema` in `vllm_xargs`: the text of a request is a prompt of that schema."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from xml.sax.saxutils import quoteattr

from vllm_choreo.errors import ChoreoError, PmlError, UnsupportedOptionError
from vllm_choreo.pml.language.markup import parse_prompt
from vllm_choreo.pml.language.tree import Prompt
from vllm_choreo.server.wings import BegunPrompt, Body, PromptRequest

# Names of the arguments that a prompt has beside those of a decode.
ARGUMENTS = ("schema", "layout")
# Of a request with a schema, the schema says these.
_NOT_BESIDE = ("parents", "offsets", "new_offset", "prefix")
_OPTIONS = ("mode", "repair", "deny")


async def begin(request: PromptRequest) -> BegunPrompt:
    """Submit the calls of a prompt before its last one, which becomes the request's.

    Raises:
        ChoreoError: the prompt is illegal.
    """
    run, arguments = request.run, request.arguments
    name, layout = (arguments.pop(key, None) for key in ARGUMENTS)
    if name is None:
        raise ChoreoError("a layout is that of a prompt's schema", parameter="layout")
    for other in _NOT_BESIDE:
        if other in arguments:
            raise UnsupportedOptionError(
                "the schema says what a prompt reads and where: leave this out",
                parameter=other,
                value="given",
            )
    options = {key: arguments.pop(key, None) for key in _OPTIONS} | {"layout": layout}
    options["adapter"] = request.adapter
    prompts = request.state.choreo_schemas.of_session(request.session)
    read = partial(prompt_of, _text(request.body), name)
    calls = await prompts.calls(read, options, run.sessions.config.max_calls_per_request)
    # The last call takes its adapter from the request.
    arguments.update({key: value for key, value in calls.options.items() if key != "adapter"})
    usage = asdict(calls.asked.plan.usage)
    if not calls.pieces:
        return BegunPrompt(calls.header, usage)
    await run.submit(calls.pieces)
    return BegunPrompt(calls.header, usage, partial(prompts.free_pieces, list(run.pending)))


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
