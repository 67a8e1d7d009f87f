# SPDX-License-Identifier: Apache-2.0
"""`Cutter`: makes parts of a chat that a model's own renderer has made tokens of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_choreo.chat.marks import Content, places
from vllm_choreo.chat.parts import ChatPicture, Split, cut_long_parts, split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm_choreo.chat.content_cuts import Ranks

# Parts of fewer tokens are joined: every message takes whole blocks, of 16 or 32 tokens as a rule.
DEFAULT_MIN_TOKENS = 16
# Of pieces of long parts, on average. Short ones are found more often, and fill their blocks worse.
DEFAULT_CUT_TOKENS = 128


class Cutter:
    """Cutter of rendered chats.

    Args:
        tokenizer: tokenizer of transformers; one that tells no characters of tokens cuts nothing.
        ends: the tokens that end what the model generates, see `end_tokens`.
        min_tokens: shorter parts are joined with their neighbours.
        cut: where parts end, one of `AUTO_CUTS`.
        cut_tokens: tokens, on average, of the pieces of parts that are cut by their content.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        min_tokens: int = DEFAULT_MIN_TOKENS,
        cut: str = "messages",
        cut_tokens: int = DEFAULT_CUT_TOKENS,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._min_tokens = min_tokens
        self._cut = cut
        self._cut_tokens = cut_tokens
        self._ranks: Ranks | None = None

    def split(
        self,
        token_ids: Sequence[int],
        text: str | None,
        marks: str | Sequence[int],
        contents: Sequence[Content],
        min_tokens: int | None = None,
        cut: str | None = None,
        keeps_beginning: bool = False,
        pictures: Sequence[ChatPicture] = (),
    ) -> Split:
        """Cut a chat into parts.

        Args:
            token_ids: tokens of the chat, as it was rendered for the model.
            text: the same as text, if the renderer made text of it first.
            marks: the same with marks, as text or tokens.
            contents: contents of the marks, see `marked`.
            min_tokens: the least tokens of a part; None: the cutter's own.
            cut: where parts end; None: the cutter's own.
            keeps_beginning: parts of the chat's beginning are joined with one another alone.
            pictures: pictures among the tokens, for each of which the text has one token.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            return Split(tuple(token_ids), reason="tokenizer")
        text = self._text(token_ids) if text is None else text
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = offsets_of(token_ids, encoded["input_ids"], encoded["offset_mapping"], pictures)
        # A truncated prompt, or one to which special tokens were added, is not that of the text.
        if offsets is None:
            return Split(tuple(token_ids), reason="tokenizer")
        found = places(text, marks if isinstance(marks, str) else self._text(marks), contents)
        least = self._min_tokens if min_tokens is None else min_tokens
        parts = split(token_ids, offsets, found, len(text), self._ends, least, keeps_beginning)
        parts = replace(parts, pictures=tuple(pictures))
        return self.cut_content(parts) if (cut or self._cut) == "content" else parts

    def cut_content(self, parts: Split) -> Split:
        """Cut parts that are long inside, by their content."""
        if self._ranks is None:
            from vllm_choreo.chat.content_cuts import token_ranks

            self._ranks = token_ranks(self._tokenizer)
        return cut_long_parts(parts, self._ranks, self._cut_tokens)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def offsets_of(
    token_ids: Sequence[int],
    text_ids: Sequence[int],
    text_offsets: Sequence[tuple[int, int]],
    pictures: Sequence[ChatPicture],
) -> list[tuple[int, int]] | None:
    """Characters of each token of a chat; None: its tokens are not those of its text.

    Args:
        text_ids, text_offsets: tokens of the text and their characters.
        pictures: pictures, whose tokens have the characters of the one that stands for them there.
    """
    offsets, at, start = list[tuple[int, int]](), 0, 0
    for picture in (*pictures, None):
        stop = len(token_ids) if picture is None else picture.start
        end = at + stop - start
        if list(text_ids[at:end]) != list(token_ids[start:stop]):
            return None
        offsets += text_offsets[at:end]
        at = end
        if picture is not None:
            offsets += list(text_offsets[at : at + 1]) * (picture.stop - picture.start)
            at, start = at + 1, picture.stop
    return offsets if (at, len(offsets)) == (len(text_ids), len(token_ids)) else None


def end_tokens(
    tokenizer: PreTrainedTokenizerBase, generation_config: Mapping[str, Any]
) -> frozenset[int]:
    """Tokens that end what a model generates.

    Args:
        generation_config: the model's, as a dict; its `eos_token_id` is an id or a list of them.
    """
    told = generation_config.get("eos_token_id")
    listed = told if isinstance(told, Sequence) else [told]
    return frozenset(token for token in (tokenizer.eos_token_id, *listed) if token is not None)
