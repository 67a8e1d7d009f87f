# SPDX-License-Identifier: Apache-2.0
"""A tenant's session on the client's side: which messages there are, and which calls are legal.

`plan` turns what the caller wrote into `Call`s, or refuses all of them before any is submitted.
Both facades (`Choreography`, `AsyncChoreography`) and both modes share it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.api.entries import Entries
from vllm_choreo.api.options import checked_sampling_params
from vllm_choreo.errors import ChoreoError, CyclicParentsError, EmptyTokensError, TooLongError
from vllm_choreo.semantics.message import Call, Message
from vllm_choreo.semantics.params import ChoreoParams, ParentSpan, check_span
from vllm_choreo.semantics.positions import check_text_offsets, resolve_span
from vllm_choreo.semantics.provenance import Trace, trace_of

CALL_MODES = ("choreo", "exact")
# With a list of calls, these may be given once for all of them.
_FOR_ALL = ("sampling_params", "mode", "deny")
_OPTIONS = ("parents", "offsets", "new_offset", "save_as", *_FOR_ALL)
# What a call is of: the keys, and the kind of call that each makes.
_CONTENTS = {"tokens": "prefill", "header": "decode", "copy_of": "prefill"}
# "/" separates session and name, and plain numbers are the ids that we choose.
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class Tokenized:
    """Text that the caller has tokenised, as the session would: without special tokens added."""

    text: str
    token_ids: tuple[int, ...]


class Session:
    """The messages of one session and the rules for the next call.

    Args:
        tokenizer: the model's; text is tokenised without special tokens added.
        model_config: vLLM's, for the vocabulary, the context length and the sampling defaults.
        mode: of calls that name none; in "baseline" every call is text, whatever it names.
        tenant: to whom it belongs; identical messages of one tenant are encoded once.
        limits: see `Entries`.
    """

    def __init__(
        self,
        tokenizer: Any,
        model_config: Any,
        mode: str = "choreo",
        tenant: str = "",
        limits: Any = None,
    ) -> None:
        self.id = secrets.token_hex(16)
        self.mode = mode
        self.tenant = tenant
        self.entries = Entries(self.id, limits)
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._count = 0

    # -- planning ----------------------------------------------------------------------------

    def plan(
        self, kind: str, tokens: Any, shared: Mapping[str, Any], denied: Sequence[str] = ()
    ) -> tuple[list[Call], bool]:
        """Validate a call, or a list of calls; reserve nothing unless all of it is right.

        Args:
            kind: "prefill" or "decode".
            tokens: text, token ids, or a list of dicts.
            shared: the other arguments of the call by name; None means not given.
            denied: ids of messages that are denied to every call, besides those in `shared`.

        Returns:
            The calls, and whether a list was asked for.

        Raises:
            ChoreoError: the first reason why a call is refused.
        """
        self.entries.check_open()
        shared = {**shared, "deny": (*denied, *self.entries.denied(shared.get("deny")))}
        many = isinstance(tokens, Sequence) and bool(tokens) and isinstance(tokens[0], Mapping)
        if many:
            items = [self._item(item, shared, ("tokens", "header")) for item in tokens]
        else:
            items = [{**shared, "tokens": tokens}]
        count = self._count
        try:
            calls = [self._call(kind, item) for item in items]
            self.entries.check_new(calls)
        except ChoreoError:
            self._count = count
            raise
        self.entries.started(calls)
        return calls, many

    def plan_each(self, items: Sequence[Any], denied: Sequence[str] = ()) -> list[Call]:
        """Validate calls of both kinds, of which later ones may name earlier ones.

        Args:
            items: dicts like those of a parallel list, with one of the keys `header` (a decode),
                `tokens` and `copy_of` (a prefill).
            denied: ids of messages that are denied to every call.

        Raises:
            ChoreoError: the first reason why a call is refused; then nothing is reserved.
        """
        self.entries.check_open()
        count, calls = self._count, []
        try:
            for item in items:
                full = self._item(item, {"deny": tuple(denied)}, tuple(_CONTENTS))
                kind = next(_CONTENTS[key] for key in _CONTENTS if key in item)
                call = self._call(kind, full)
                self.entries.check_new([call])
                self.entries.started([call])
                calls.append(call)
        except ChoreoError:
            self.entries.withdrawn(calls)
            self._count = count
            raise
        return calls

    def _item(
        self, item: Any, shared: Mapping[str, Any], contents: Sequence[str]
    ) -> dict[str, Any]:
        """One dict of a list, checked and completed with what is given for all of them."""
        if not isinstance(item, Mapping):
            raise ChoreoError("a parallel list holds dicts alone", parameter="tokens", value=item)
        for key, value in shared.items():
            if key not in _FOR_ALL and value is not None:
                raise ChoreoError(
                    f"with a list of calls, give {key} in each dict", parameter=key, value=value
                )
        known = {*_OPTIONS, *contents}
        for key in item:
            if key not in known:
                raise ChoreoError(
                    f"unknown key; the keys are {', '.join(sorted(known))}",
                    parameter=str(key),
                    value=item[key],
                )
        if sum(key in item for key in contents) != 1:
            raise ChoreoError(
                f"each dict needs either {' or '.join(contents)}",
                parameter=contents[0],
                value=dict(item),
            )
        full = {**shared, **item}
        full["deny"] = (*shared["deny"], *self.entries.denied(item.get("deny")))
        full["tokens"] = item.get("header", item.get("tokens"))
        return full

    def _call(self, kind: str, item: Mapping[str, Any]) -> Call:
        message_id = self._new_id(item.get("save_as"))
        copied = item.get("copy_of")
        copy_of = None if copied is None else self._parent(copied, message_id, "message")
        if copy_of is None:
            token_ids, text = self._tokens(kind, item["tokens"])
        else:
            token_ids, text = self._copied(copy_of)
        sampling_params = checked_sampling_params(
            kind, item.get("sampling_params"), self._model_config
        )
        params = ChoreoParams(
            parents=self._parents(item.get("parents"), message_id),
            offsets=item.get("offsets"),
            new_offset=item.get("new_offset"),
            save_as=message_id,
            kind=kind,
            session=self.id,
            tenant=self.tenant,
            open_end=sampling_params is not None and bool(sampling_params.stop),
            exact=self._mode(item.get("mode")) == "exact",
            deny=tuple(dict.fromkeys(item["deny"])),
            copy_of=copy_of and copy_of.id,
        )
        self._check_length(params.parents, len(token_ids))
        self._check_offsets(params)
        return Call(text, token_ids, params, sampling_params, self._trace(params))

    def _mode(self, given: Any) -> str:
        if given is None or (given in CALL_MODES and self.mode == "baseline"):
            return self.mode
        if given not in CALL_MODES:
            raise ChoreoError(
                f"the mode of a call is one of {CALL_MODES}; baseline is that of a whole session",
                parameter="mode",
                value=given,
            )
        return str(given)

    def _copied(self, span: ParentSpan) -> tuple[tuple[int, ...], str]:
        """The token ids of a message that is to be encoded anew, or of a part, and their text."""
        message = self.entries.complete("message", span.id)
        start, stop = resolve_span(span.start, span.stop, message.num_tokens, span.id)
        token_ids = message.token_ids[start:stop]
        is_whole = len(token_ids) == message.num_tokens
        return token_ids, message.text if is_whole else self._tokenizer.decode(token_ids)

    def _trace(self, params: ChoreoParams) -> Trace:
        """What the message will carry traces of.

        Raises:
            DeniedMessageError: traces of a message that is denied to the call.
        """
        assert params.save_as is not None
        is_text = self.mode == "baseline"
        parents = [self.entries.get("parents", span.id).trace for span in params.parents]
        origin = self.entries.get("message", params.copy_of).trace if params.copy_of else None
        trace = trace_of(params.save_as, parents, is_text or params.exact, origin)
        trace.check(params.deny)
        return trace.as_text() if is_text else trace

    def _tokens(self, kind: str, tokens: Any) -> tuple[tuple[int, ...], str]:
        """The token ids of text or ids, and their text."""
        name = "header" if kind == "decode" else "tokens"
        if isinstance(tokens, Tokenized):
            ids, text = tokens.token_ids, tokens.text
            tokens = text  # what the caller gave, for errors
        elif isinstance(tokens, str):
            ids = tuple(self._tokenizer.encode(tokens, add_special_tokens=False))
            text = tokens
        elif isinstance(tokens, Sequence) and not isinstance(tokens, (bytes, bytearray)):
            ids = tuple(tokens)
            vocab_size = self._model_config.get_vocab_size()
            for token in ids:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise ChoreoError(
                        f"a token id is an int from 0 to {vocab_size - 1}; for parallel calls "
                        "give a list of dicts",
                        parameter=name,
                        value=token,
                    )
            text = self._tokenizer.decode(ids)
        else:
            raise ChoreoError(
                f"{name} must be text, token ids, or a list of dicts", parameter=name, value=tokens
            )
        if not ids:
            raise EmptyTokensError(
                "a message needs at least one token; leave the call out if there is nothing to say",
                parameter=name,
                value=tokens,
            )
        return ids, text

    def _new_id(self, save_as: Any) -> str:
        if save_as is None:
            self._count += 1
            return f"{self.id}/{self._count - 1}"
        if not isinstance(save_as, str) or not _NAME.fullmatch(save_as):
            raise ChoreoError(
                "save_as is a name of 1 to 128 letters, digits and _ . : - that is no plain number",
                parameter="save_as",
                value=save_as,
            )
        return f"{self.id}/{save_as}"

    # -- parents -----------------------------------------------------------------------------

    def _parents(self, parents: Any, message_id: str) -> tuple[ParentSpan, ...]:
        if parents is None:
            return ()
        if isinstance(parents, (str, Message)) or not isinstance(parents, Sequence):
            raise ChoreoError(
                "parents must be a list of messages", parameter="parents", value=parents
            )
        return tuple(self._parent(parent, message_id) for parent in parents)

    def _parent(self, parent: Any, message_id: str, parameter: str = "parents") -> ParentSpan:
        start = stop = None
        named = parent
        if isinstance(parent, Sequence) and not isinstance(parent, str):
            if len(parent) != 3:
                raise ChoreoError(
                    "a parent is a message, an id, or (message, start, stop)",
                    parameter=parameter,
                    value=parent,
                )
            named, start, stop = parent
        parent_id = self.entries.resolve(parameter, named)
        if parent_id == message_id:
            raise CyclicParentsError(
                "a call cannot be its own parent", parameter=parameter, value=parent_id
            )
        entry = self.entries.get(parameter, parent_id)
        check_span(start, stop, entry.num_tokens if isinstance(entry, Message) else None, parent)
        return ParentSpan(parent_id, start, stop)

    # -- limits and options ------------------------------------------------------------------

    def _check_length(self, parents: Sequence[ParentSpan], num_new: int) -> None:
        """Refuse what cannot fit whatever the engine does; it knows the exact limit itself."""
        total = num_new + sum(self._lengths(parents))
        limit = self._model_config.max_model_len
        if total >= limit:
            raise TooLongError(
                f"{total} tokens of parents and new message do not fit into a context of {limit}; "
                "list fewer parents, or start the engine with a larger max_model_len",
                parameter="parents",
                value=f"{len(parents)} parents, {num_new} new tokens",
            )

    def _check_offsets(self, params: ChoreoParams) -> None:
        """In exact mode; where a parent's length is not known yet, the engine checks."""
        lengths = self._lengths(params.parents)
        if params.exact and len(lengths) == len(params.parents):
            check_text_offsets(lengths, params.offsets, params.new_offset)

    def _lengths(self, parents: Sequence[ParentSpan]) -> list[int]:
        """Of the parents that are complete, in tokens."""
        spans = [(span, self.entries.get("parents", span.id)) for span in parents]
        return [
            (entry.num_tokens if span.stop is None else span.stop) - (span.start or 0)
            for span, entry in spans
            if isinstance(entry, Message)
        ]
