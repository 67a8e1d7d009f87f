# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo explain --chat FILE`: what `choreo_auto` would reuse of recorded chats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.chat.forecast import Forecast, Forecaster, requests_of
from vllm_choreo.chat.matching import AUTO_CUTS
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.numbers import positive
from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATES = {
    "new": "encoded",
    "same": "reused",
    "moved": "reused in choreo: the answer may differ",
}


def command(parser: argparse.ArgumentParser) -> Main:
    """Show what of recorded chats would be reused, and where answers may differ."""
    parser.add_argument(
        "--chat",
        type=Path,
        required=True,
        metavar="FILE",
        help='JSON: {"messages": [...]}, with "tools" if there were any, or a list of such',
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="folder or name of the model, for its tokenizer (default: the small test model)",
    )
    parser.add_argument(
        "--min-tokens", type=positive, metavar="N", help="join shorter parts (default: 16)"
    )
    parser.add_argument(
        "--cut",
        choices=AUTO_CUTS,
        default="messages",
        help="where parts end (default: %(default)s)",
    )
    parser.add_argument(
        "--block-size", type=positive, default=16, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument("--parts", action="store_true", help="show the parts of each request")
    return main


def main(args: argparse.Namespace) -> int:
    """Print what would be reused."""
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import model_folder

    recorded = _read(args.chat)
    model = model_folder(args.model)
    forecaster = forecaster_of(
        AutoTokenizer.from_pretrained(model), model, args.min_tokens, args.cut, args.block_size
    )
    found = [
        forecaster.request(chat, answer, **rendering)
        for chat, answer, rendering in requests_of(recorded)
    ]
    print(explained(found, with_parts=args.parts))
    return 0


def forecaster_of(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    min_tokens: int | None,
    cut: str,
    block_size: int,
) -> Forecaster:
    """Forecaster with a model's tokenizer.

    Args:
        model: its folder or name, for the tokens that end its answers.
        cut: where parts end, one of `AUTO_CUTS`.
    """
    from transformers import GenerationConfig

    from vllm_choreo.chat.cutter import DEFAULT_MIN_TOKENS, Cutter, end_tokens

    try:
        generation = GenerationConfig.from_pretrained(model).to_dict()
    except OSError:  # it has none
        generation = {}
    ends = end_tokens(tokenizer, generation)
    cutter = Cutter(tokenizer, ends, min_tokens or DEFAULT_MIN_TOKENS, cut)
    return Forecaster(tokenizer, cutter, block_size)


def explained(found: Sequence[Forecast], *, with_parts: bool = False) -> str:
    """A line for each request, with its parts if asked for, and the sums."""
    head = f"{'request':>7} {'tokens':>7} {'prefix caching':>15} {'exact':>7} {'choreo':>7}"
    lines = [head, "-" * len(head)]
    for number, one in enumerate(found, 1):
        numbers = f"{number:>7} {one.num_tokens:>7} {one.prefix:>15} {one.exact:>7} {one.choreo:>7}"
        lines.append(numbers + _note(one))
        if with_parts:
            for part in one.parts:
                at = ", ".join(map(str, part.messages)) or "-"
                lines.append(
                    f"{'':>7} {part.num_tokens:>7}   {part.role or 'no text':<10} message {at}: "
                    f"{_STATES[part.state]}"
                )
    total = sum(one.num_tokens for one in found)
    sums = [sum(getattr(one, name) for one in found) for name in ("prefix", "exact", "choreo")]
    lines.append(f"{'all':>7} {total:>7} {sums[0]:>15} {sums[1]:>7} {sums[2]:>7}")
    num_differ = sum(one.may_differ for one in found)
    lines += [
        "",
        "Tokens of each prompt that need not be encoded. exact: the answers are those of plain "
        "text, always.",
        f"choreo: {num_differ} of {len(found)} answers may differ from plain text: what they read "
        "was encoded behind other messages.",
    ]
    return "\n".join(lines)


def _note(one: Forecast) -> str:
    if one.reason:
        return f"   served as text: {one.reason}"
    return "   choreo may differ" if one.may_differ else ""


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ChoreoError(
            f"no JSON can be read from it: {error}", parameter="chat", value=path
        ) from None
