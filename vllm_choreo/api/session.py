# SPDX-License-Identifier: Apache-2.0
"""A tenant's session on the client's side: its messages, and the rules for legal calls.

`plan` turns `CallSpec`s into `PlannedCall`s, or refuses all of them before any is submitted. Both
facades (`Choreography`, `AsyncChoreography`) and both modes share it.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm_choreo.api.adapters import SessionAdapters
from vllm_choreo.api.entries import Entries
from vllm_choreo.api.options import checked_sampling_params
from vllm_choreo.api.placeholders import check_placeholders, placeholder_of
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.session_repair import SessionRepair
from vllm_choreo.chat.template import TemplatedTokenizer
from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    EmptyTokensError,
    RepairError,
    TooLongError,
    UnsupportedOptionError,
)
from vllm_choreo.repair.rules import GivenRuns
from vllm_choreo.repair.runs import check_inside
from vllm_choreo.semantics.call import CALL_MODES, CallSpec, Tokenized, content_name
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan, message_ids
from vllm_choreo.semantics.params import ChoreoParams
from vllm_choreo.semantics.positions import check_text_offsets, resolve_span
from vllm_choreo.semantics.provenance import Trace, trace_of
from vllm_choreo.semantics.session_options import SessionOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs.engine import MultiModalInput

DEFAULT_PIN_SECONDS = 600.0
# "/" separates session and name, and plain numbers are the ids that we choose.
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9_.:-]{1,128}")


class Tokenizer(Protocol):
    """Tokenizer of the model, as far as a session uses it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class Session:
    """The messages of one session and the rules for the next call.

    Args:
        tokenizer: the model's; text is tokenised without special tokens added.
        vllm_config: the engine's `VllmConfig`: vocabulary, context length, sampling defaults, and
            whether it takes adapters.
        options: the options that the session is opened with.
        num_unfinished: function that counts the engine's unfinished requests.

    Raises:
        ChoreoError: as `SessionAdapters`, or no such rule.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vllm_config: VllmConfig,
        options: SessionOptions,
        num_unfinished: Callable[[], int] = int,
    ) -> None:
        self.id = options.session_id or secrets.token_hex(16)
        self.mode = options.mode
        self.tenant = options.tenant
        self.entries = Entries(self.id, options.limits, keeps_pictures=options.mode == "baseline")
        self._tokenizer = tokenizer
        self._model_config = vllm_config.model_config
        self.adapters = SessionAdapters(vllm_config, options)
        model = vllm_config.model_config.model
        self.repair = SessionRepair(options, model, self.entries, num_unfinished)
        # Then a picture takes fewer positions than tokens (M-RoPE).
        self._uses_rows: bool = getattr(self._model_config, "uses_mrope", False)
        self._placeholder = placeholder_of(self._model_config)
        self._count = 0

    @property
    def identity(self) -> dict[str, str] | None:
        """Model, adapter and repair behind the answers, as text; None: repair follows the load.

        Its keys are "model", "revision", "dtype", "quantization", "adapter" and "repair".
        """
        if self.repair.follows_load:
            return None
        names = ("model", "revision", "dtype", "quantization")
        return {
            **{name: str(getattr(self._model_config, name, "")) for name in names},
            "adapter": self.adapters.identity,
            "repair": str(self.repair.rule or ""),
        }

    # -- messages that were saved -------------------------------------------------------------

    def names_of(self, session: str, ids: Sequence[str]) -> dict[str, str]:
        """The ids that messages have here which were saved in `session`: under their names.

        Those that a session numbered are numbered anew, unless it was this one, or this one has
        numbered none yet.

        Raises:
            NameTakenError: there is such a message.
            ChoreoError: one has no name that a message can have.
        """
        renamed = {}
        for message_id in ids:
            name = message_id.removeprefix(f"{session}/")
            if not (name.isdecimal() or _NAME.fullmatch(name)):
                raise ChoreoError("no message has such a name", parameter="uri", value=name)
            if name.isdecimal() and self._count and session != self.id:
                renamed[message_id] = self._new_id(None)
            else:
                renamed[message_id] = f"{self.id}/{name}"
        numbers = [int(n) for new in renamed.values() if (n := new.partition("/")[2]).isdecimal()]
        self._count = max([self._count, *(number + 1 for number in numbers)])
        self.entries.check_names(list(renamed.values()))
        return renamed

    def admit(self, messages: Sequence[Message]) -> None:
        """Enter messages that were loaded.

        Raises:
            NameTakenError, LimitError: there is no name, or no room.
        """
        self.entries.check_open()
        self.entries.admit(messages)
        self.entries.count = self._count

    def restore(self, messages: Sequence[Message], freed: Iterable[str], count: int) -> None:
        """Take in the messages of this session as another process had it.

        Args:
            freed: ids of messages that were freed.
            count: calls that give no name are numbered from here on.
        """
        self._count = count
        self.admit(messages)
        self.entries.freed(freed)

    # -- planning ----------------------------------------------------------------------------

    def plan(self, specs: Sequence[CallSpec], *, linked: bool = False) -> list[PlannedCall]:
        """Validate calls; reserve nothing unless all of them are right.

        Args:
            specs: calls as they are asked for.
            linked: later calls may name earlier ones; otherwise they do not see one another.

        Raises:
            ChoreoError: the first reason why a call is refused.
        """
        self.entries.check_open()
        calls: list[PlannedCall] = []
        count = self._count
        try:
            for group in [[spec] for spec in specs] if linked else [specs]:
                planned = [self._planned(spec, len(calls) + i) for i, spec in enumerate(group)]
                self.entries.check_new(planned)
                self.entries.started(planned)
                calls += planned
        except ChoreoError:
            self.entries.withdrawn(calls)
            self._count = count
            raise
        self.entries.count = self._count
        self.repair.note_writers(calls)
        return calls

    def _planned(self, spec: CallSpec, number: int) -> PlannedCall:
        """Plan the call that is the list's `number`-th, from 0 on."""
        if spec.multi_modal_data is not None:
            raise UnsupportedOptionError(
                "a call that is made in this way has no pictures; use prefill or decode of "
                "Choreography",
                parameter="multi_modal_data",
                value="given",
            )
        # A message has a token at least, and this is told before 100,000 of them are looked up.
        self._check_length(spec.parents, [1] * len(spec.parents), 0)
        message_id = self._new_id(spec.save_as)
        copied = spec.content if isinstance(spec.content, ParentSpan) else None
        if copied is None:
            token_ids, text = self.content_of(spec)
            if not isinstance(spec.content, Tokenized):
                check_placeholders(token_ids, 0, self._placeholder, self._tokenizer.decode)
        else:
            copied = self._span(copied, message_id, "message")
            token_ids, text = self._copied(copied)
        sampling_params = checked_sampling_params(
            spec.kind, spec.sampling_params, self._model_config
        )
        adapter = self.adapters.of(spec.kind, spec.adapter)
        exact = self._mode(spec.mode) == "exact"
        parents = tuple(self._span(span, message_id, "parents") for span in spec.parents)
        params = spec.params(
            parents=parents,
            save_as=message_id,
            session=self.id,
            tenant=self.tenant if spec.tenant is None else spec.tenant,
            reader=self.tenant if spec.tenant not in (None, self.tenant) else "",
            open_end=sampling_params is not None and bool(sampling_params.stop),
            exact=exact,
            deny=self.entries.denied(spec.deny),
            copy_of=copied and copied.id,
            repair=self.repair.of(spec, exact, parents, adapter, number),
            keep_hidden=self.repair.keep_hidden if spec.keep_hidden is None else spec.keep_hidden,
        )
        self._check_runs(params)
        lengths = self._lengths(params.parents)
        self._check_length(params.parents, lengths, len(token_ids))
        # Where a parent's length is not known yet, or not in positions, the engine checks.
        if params.exact and len(lengths) == len(params.parents) and not self._uses_rows:
            check_text_offsets(lengths, params.offsets, params.new_offset)
        trace = self._trace(params)
        prompt = spec.content.prompt if isinstance(spec.content, Tokenized) else None
        return PlannedCall(
            *(text, token_ids, params, sampling_params, trace, adapter, spec.role),
            prompt=cast("MultiModalInput | None", prompt),
        )

    def _mode(self, given: str | None) -> str:
        if given is None or (given in CALL_MODES and self.mode == "baseline"):
            return self.mode
        if given not in CALL_MODES:
            raise ChoreoError(
                f"the mode of a call is one of {CALL_MODES}; baseline is that of a whole session",
                parameter="mode",
                value=given,
            )
        return str(given)

    def _trace(self, params: ChoreoParams) -> Trace:
        """History of the message that a call would make.

        Raises:
            DeniedMessageError: traces of a message that is denied to the call.
        """
        assert params.save_as is not None
        is_text = self.mode == "baseline"
        parents = [self.entries.trace("parents", span.id) for span in params.parents]
        origin = self.entries.trace("message", params.copy_of) if params.copy_of else None
        trace = trace_of(params.save_as, parents, is_text or params.exact, origin)
        trace.check(params.deny)
        return trace.as_text() if is_text else trace

    def _new_id(self, save_as: object) -> str:
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

    def deniable(self, messages: Sequence[Named]) -> tuple[str, ...]:
        """Ids of messages to deny to calls. Raises ChoreoError: as `Entries.denied`."""
        self.entries.check_open()
        return self.entries.denied(message_ids(messages, "deny"))

    def stats(self) -> dict[str, Any]:
        """Numbers that the client itself knows: `messages` and their `tokens`."""
        messages = self.entries.messages().values()
        return {"messages": len(messages), "tokens": sum(m.num_tokens for m in messages)}

    def with_choices(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Add to the engine's numbers which layers a pair's profile has chosen."""
        choices = self.repair.choices
        return stats if choices is None else {**stats, "layers_chosen": choices}

    # -- the new tokens ----------------------------------------------------------------------

    @functools.cached_property
    def turns(self) -> ChatTurns | None:
        """Texts around a chat's turns, as the model's template writes them; None: it has none.

        Raises:
            ChoreoError: the template does not write questions and answers in turns.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            return None
        return turns_of_tokenizer(cast(TemplatedTokenizer, self._tokenizer))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of text; no special tokens are added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def content_of(self, spec: CallSpec) -> tuple[tuple[int, ...], str]:
        """The token ids of text or ids, and their text.

        Raises:
            EmptyTokensError, ChoreoError: there are none, or the model does not know one.
        """
        name, content = content_name(spec.kind), spec.content
        if isinstance(content, Tokenized):
            ids, text = content.token_ids, content.text
        elif isinstance(content, str):
            ids, text = self.tokenize(content), content
        else:
            assert not isinstance(content, ParentSpan), "copies have their tokens"
            ids, vocab_size = content, self._model_config.get_vocab_size()
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ChoreoError(
                        f"a token id is an int from 0 to {vocab_size - 1}",
                        parameter=name,
                        value=token,
                    )
            text = self._tokenizer.decode(ids)
        if not ids:
            raise EmptyTokensError(
                "a message needs at least one token; leave the call out if there is nothing to say",
                parameter=name,
                value=text or [],
            )
        return ids, text

    def _copied(self, span: ParentSpan) -> tuple[tuple[int, ...], str]:
        """The token ids of a message that is to be encoded anew, or of a part, and their text."""
        message = self.entries.complete("message", span.id)
        start, stop = resolve_span(span.start, span.stop, message.num_tokens, span.id)
        token_ids = message.token_ids[start:stop]
        is_whole = len(token_ids) == message.num_tokens
        if not is_whole and self.entries.pictures(span.id):
            raise UnsupportedOptionError(
                "a message with pictures is encoded anew as a whole: name all of it",
                parameter="message",
                value=span.id,
            )
        return token_ids, message.text if is_whole else self._tokenizer.decode(token_ids)

    # -- parents -----------------------------------------------------------------------------

    def _span(self, span: ParentSpan, new_id: str, parameter: str) -> ParentSpan:
        """The same span under the id of its message, which exists."""
        message_id = self.entries.resolve(span.id)
        if message_id == new_id:
            raise CyclicParentsError(
                "a call cannot be its own parent", parameter=parameter, value=message_id
            )
        self.entries.get(parameter, message_id)
        return span._replace(id=message_id)

    def _lengths(self, parents: Sequence[ParentSpan]) -> list[int]:
        """Lengths of the complete parents, in tokens.

        Raises:
            SpanError: a sub-span does not lie inside its message.
        """
        lengths = []
        for span in parents:
            entry = self.entries.get("parents", span.id)
            if isinstance(entry, Message):
                start, stop = resolve_span(span.start, span.stop, entry.num_tokens, span.id)
                lengths.append(stop - start)
        return lengths

    def _check_runs(self, params: ChoreoParams) -> None:
        """Check that the runs of a repair lie in their parents.

        Raises:
            RepairError: a run does not lie in its parent, or names one that is still generated.
        """
        if type(params.repair) is not GivenRuns:
            return
        for span, runs in zip(params.parents, params.repair.given, strict=True):
            entry = self.entries.get("parents", span.id)
            if runs and not isinstance(entry, Message):
                raise RepairError(
                    "this parent is not complete: how many tokens it has is not known yet; wait "
                    'for it, or give a rule such as "first:32"',
                    parameter="repair",
                    value=span.id,
                )
            if runs:
                check_inside([runs], self._lengths([span]))

    def _check_length(
        self, parents: Sequence[ParentSpan], lengths: Sequence[int], num_new: int
    ) -> None:
        """Refuse what cannot fit whatever the engine does; it knows the exact limit itself."""
        total = num_new + sum(lengths)
        limit = self._model_config.max_model_len
        if total >= limit:
            raise TooLongError(
                f"{total} tokens of parents and new message do not fit into a context of {limit}; "
                f"{'shorten the new message' if num_new >= limit else 'list fewer parents'}, or "
                "start the engine with a larger max_model_len",
                parameter="parents",
                value=f"{len(parents)} parents, {num_new} new tokens",
            )
