# SPDX-License-Identifier: Apache-2.0
"""Schemas and handles of a bound cache of prompts, whether its facade is awaited or not.

It makes the arguments of calls; who calls is `PromptCache`, `AsyncPromptCache` or the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_choreo.errors import NameTakenError, PmlError, UnknownSchemaError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.choosing import choose
from vllm_choreo.pml.language.layout import Tokens
from vllm_choreo.pml.language.markup import parse_prompt, parse_schema
from vllm_choreo.pml.language.placing import FreshCall, Part, PromptPlan, place
from vllm_choreo.pml.language.registered import EncodingKey, RegisteredSchema, registered
from vllm_choreo.pml.language.tree import Prompt, Schema

# Options that all calls of a prompt have, and those of the last one alone.
_OF_ALL = ("mode", "repair", "adapter", "deny")
_OF_LAST = ("sampling_params", "save_as")
OPTIONS = (*_OF_ALL, *_OF_LAST)

PromptGiven: TypeAlias = str | Prompt | Mapping[str, Any]


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt with its plan.

    Attributes:
        plan: its calls.
        schemas: schemas that it takes modules of.
        messages: messages that are passed, by name.
        for_all: options of all its calls.
        for_last: options of the last one alone.
    """

    plan: PromptPlan
    schemas: tuple[RegisteredSchema, ...]
    messages: Mapping[str, Any]
    for_all: Mapping[str, Any]
    for_last: Mapping[str, Any]


@dataclass
class SchemaBook:
    """Schemas of a session, and what of them is encoded there.

    Attributes:
        tokens, chat: tokenizer and chat template of the model.
        mode: mode of the session.
        schemas: registered schemas, by name.
        handles: messages of the segments that are encoded, by their encodings.
    """

    tokens: Tokens
    chat: ChatTemplate
    mode: str = "choreo"
    schemas: MutableMapping[str, RegisteredSchema] = field(default_factory=dict)
    handles: dict[EncodingKey, Any] = field(default_factory=dict)

    # -- schemas -----------------------------------------------------------------------------

    def register(
        self, schema: str | Schema, context: str = "modules", adapter: object = None
    ) -> RegisteredSchema:
        """Add a schema; see `PromptCache.register`.

        Raises:
            NameTakenError: another one of this name is registered; the same one is none.
            PmlError: it is no schema.
        """
        tree = parse_schema(schema) if isinstance(schema, str) else schema
        if not isinstance(tree, Schema):
            raise PmlError("a schema is markup or a Schema", parameter="schema", value=schema)
        made = registered(tree, self.tokens, self.chat, context, adapter)
        found = self.schemas.get(tree.name)
        if found is not None and not _is_same(found, made):
            raise NameTakenError(
                "another schema of this name is registered: delete it, or choose another name",
                parameter="schema",
                value=tree.name,
            )
        return self.schemas.setdefault(tree.name, made)

    def unregister(self, name: str) -> list[Any]:
        """Forget a schema; return the handles that are to be freed.

        Raises:
            UnknownSchemaError: there is none.
        """
        self.named(name)
        del self.schemas[name]
        return [self.handles.pop(key) for key in [*self.handles] if key.schema == name]

    def named(self, name: str) -> RegisteredSchema:
        """Schema of a name.

        Raises:
            UnknownSchemaError: there is no schema of that name.
        """
        if name not in self.schemas:
            raise UnknownSchemaError(
                "there is no such schema: register it first", parameter="schema", value=name
            )
        return self.schemas[name]

    # -- encoding ----------------------------------------------------------------------------

    def missing(self, keys: Iterable[EncodingKey]) -> list[EncodingKey]:
        """Encodings that are to be made for these, each after those it reads."""
        return [key for key in self.with_needs(keys) if key not in self.handles]

    def with_needs(self, keys: Iterable[EncodingKey]) -> list[EncodingKey]:
        """Add all encodings that these read, each after those it reads."""
        by_schema: dict[str, list[EncodingKey]] = {}
        for key in keys:
            by_schema.setdefault(key.schema, []).append(key)
        return [
            needed
            for name, of_schema in by_schema.items()
            for needed in self.named(name).with_needs(of_schema)
        ]

    def ready(self, keys: Iterable[EncodingKey]) -> list[EncodingKey]:
        """Encodings of which all that they read is encoded."""
        return [
            key
            for key in keys
            if all(needed in self.handles for needed in self.named(key.schema).needs(key))
        ]

    def encoding(
        self, key: EncodingKey, pending: dict[EncodingKey, Any] | None = None
    ) -> dict[str, Any]:
        """Arguments of the prefill that encodes a segment.

        Args:
            pending: handles of encodings that it reads and that are not complete.
        """
        schema, pending = self.named(key.schema), pending or {}
        segment, needs = schema.segment(key), schema.needs(key)
        call: dict[str, Any] = {
            "tokens": list(segment.token_ids),
            "parents": [pending[n] if n in pending else self.handles[n] for n in needs],
            "offsets": [schema.segment(needed).position for needed in needs],
            "new_offset": segment.position,
            # Of an exact session, too, modules stand apart.
            "mode": "choreo",
        }
        if schema.adapter is not None:
            call["adapter"] = schema.adapter
        return call

    def touch(self, key: EncodingKey) -> dict[str, Any]:
        """Arguments of a prefill of one token that reads an encoding, and so brings it back."""
        return {
            "tokens": [self.tokens.placeholder],
            "parents": [self.handles[key]],
            "offsets": [self.named(key.schema).segment(key).position],
            "mode": "choreo",
        }

    # -- prompts -----------------------------------------------------------------------------

    def asked(self, prompt: PromptGiven, options: Mapping[str, Any]) -> AskedPrompt:
        """Plan a prompt with its options.

        Args:
            prompt: markup or a `Prompt`; or a dict with the key "prompt" and options of its own.
            options: see `PromptCache.decode`.

        Raises:
            ChoreoError: what is wrong with it.
        """
        if isinstance(prompt, Mapping):
            options = {**options, **{k: v for k, v in prompt.items() if k != "prompt"}}
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        for name in options:
            if name not in (*OPTIONS, "layout", "messages"):
                raise PmlError("there is no such option of a prompt", parameter=name, value=name)
        tree = parse_prompt(given) if isinstance(given, str) else given
        if not isinstance(tree, Prompt):
            raise PmlError("a prompt is markup or a Prompt", parameter="prompt", value=given)
        repair, messages = options.get("repair"), options.get("messages") or {}
        if isinstance(repair, Sequence) and not isinstance(repair, str):
            raise PmlError(
                "the parents of a prompt are not listed: repair them by a rule",
                parameter="repair",
                value=repair,
            )
        return AskedPrompt(
            *self._plan(tree, options.get("layout"), options.get("mode"), messages),
            messages,
            {name: options[name] for name in _OF_ALL if options.get(name) is not None},
            {name: options[name] for name in _OF_LAST if options.get(name) is not None},
        )

    def _plan(
        self, prompt: Prompt, layout: str | None, mode: str | None, messages: Mapping[str, Any]
    ) -> tuple[PromptPlan, tuple[RegisteredSchema, ...]]:
        if layout is None:  # what is exact, or text, stands as text does
            is_text = self.mode == "baseline" or (mode or self.mode) == "exact"
            layout = "compact" if is_text else "schema"
        lengths = {name: _length(named) for name, named in messages.items()}
        row = choose(prompt, self.schemas, self.tokens, self.chat, lengths, layout == "compact")
        return place(row, layout), tuple(row.schemas)

    def check_same(self, asked: AskedPrompt) -> None:
        """Check that the schemas of a prompt are still there.

        Raises:
            UnknownSchemaError: a schema of the prompt was deleted after it was planned.
        """
        for schema in asked.schemas:
            if self.schemas.get(schema.name) is not schema:
                raise UnknownSchemaError(
                    "the schema was deleted meanwhile", parameter="schema", value=schema.name
                )

    def call(
        self, asked: AskedPrompt, fresh: FreshCall, source: Callable[[int], Any]
    ) -> dict[str, Any]:
        """Arguments of one call of a prompt, but for its tokens.

        Args:
            source: gives the message of an earlier call of the prompt, by its number.
        """
        parts = asked.plan.parts[: fresh.num_parts]
        call: dict[str, Any] = {
            "parents": [self._parent(part, asked, source) for part in parts],
            "offsets": [part.offset for part in parts],
            "new_offset": fresh.offset,
            **asked.for_all,
        }
        return call

    def _parent(self, part: Part, asked: AskedPrompt, source: Callable[[int], Any]) -> object:
        if isinstance(part.source, EncodingKey):
            message = self.handles[part.source]
        elif isinstance(part.source, str):
            return asked.messages[part.source]
        else:
            message = source(part.source)
        return message if part.start is None else (message, part.start, part.stop)


def _is_same(one: RegisteredSchema, other: RegisteredSchema) -> bool:
    return (one.layout, one.context, one.adapter) == (other.layout, other.context, other.adapter)


def _length(named: object) -> int | None:
    """Number of tokens of a message, or of a part of one; None: it is not known here."""
    if isinstance(named, Sequence) and not isinstance(named, str):
        start, stop = (*named, None, None)[1:3]
        return stop - start if isinstance(start, int) and isinstance(stop, int) else None
    return getattr(named, "num_tokens", None)
