# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo doctor`: is choreography right for this model, on this machine?

Three questions: how do positions enter each attention layer (the probe that every engine runs at
its start); which attention kernel runs; and do choreographed calls give what HuggingFace gives? Of
a model with states in place of keys these calls are chains: a message run behind another one's
state is compared with the text of both. Then such an engine is started once more, with
`composed_states`: its own probe says whether states are composed in any order.

The last one knows nothing of rotations, neither the probe's nor anybody's: see `reference`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import set_up_process
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.reference import Made, Reference, num_unlike_greedy

if TYPE_CHECKING:
    from vllm import LLM

# Float32 on both sides; one wrong position costs a hundred times as much.
LOGPROB_TOLERANCE = 2e-3
ANSWER_TOKENS = 8
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, eq=False)
class CaseRun:
    """A case that was run: the engine's message, and the same for the reference to encode."""

    message: Message
    made: Made


@dataclass(frozen=True)
class Verdict:
    """Comparison of one choreographed answer with HuggingFace's.

    Attributes:
        agreed, num_tokens: generated tokens that HuggingFace chooses as well, and all of them.
        difference: largest difference in log-probability over the five best tokens of each.
    """

    name: str
    agreed: int
    num_tokens: int
    difference: float

    @property
    def is_right(self) -> bool:
        return self.agreed == self.num_tokens and self.difference <= LOGPROB_TOLERANCE


def command(parser: argparse.ArgumentParser) -> Main:
    """Check on this machine that choreography is right for a model (against HuggingFace)."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder or name (default: the small test model)",
    )
    return main


def main(args: argparse.Namespace) -> int:
    """Examine a model and print what was found.

    Args:
        args: `model`, a folder or name, or None for the small test model.

    Returns:
        The exit status: 0 if all answers agree, 1 if one does not or the engine refuses the model.
    """
    from vllm_choreo.testing.models.embedded import model_folder

    model = model_folder(args.model)
    print(f"Starting vLLM with {model} …", flush=True)
    try:
        llm = start_engine(model)
    except ValueError as error:  # ours, or vLLM's own refusal; both say what to do
        print(f"vllm-choreo: {error}", file=sys.stderr)
        return 1
    try:
        positions = llm.collective_rpc("choreo_positions")[0]
        block_size = llm.llm_engine.vllm_config.cache_config.block_size
        print(f"\n{positions_table(positions)}\n\n{_kernel()}\nBlock size: {block_size} tokens\n")
        states = llm.collective_rpc("choreo_states")[0]
        if states:
            print(f"{states_table(states)}\n")
        cases = _run_chains(llm) if states else _run_cases(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    if states:
        print(f"{_any_order(model)}\n")
    verdicts = _compare(model, cases, is_text=bool(states))
    print(verdicts_table(verdicts))
    if all(verdict.is_right for verdict in verdicts):
        print("\nChoreography is right for this model.")
        return 0
    print("\nvllm-choreo: some answers differ; do not use this model.", file=sys.stderr)
    return 1


def start_engine(model: str, **options: object) -> LLM:
    """A `vllm.LLM` in this process: float32, quiet, no compilation.

    Args:
        model: folder or name.
        options: further ones of `vllm.LLM`, or in place of those here.

    Raises:
        ValueError: vLLM or choreography refuses the model; says why.
    """
    # HuggingFace runs in the same process later: bound threads would wait for one another.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    set_up_process(kv_cache_gib=1)
    from transformers import AutoConfig
    from vllm import LLM

    known = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", MAX_MODEL_LEN)
    defaults = {
        "dtype": "float32",
        "max_model_len": min(MAX_MODEL_LEN, known),
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    return LLM(model, **(defaults | options))


def _kernel() -> str:
    from vllm_choreo.ops import default_impl

    impl = default_impl()
    note = "C++" if impl == "cpu" else "plain PyTorch, many times slower: build the C++ kernels"
    return f"Attention: {impl} ({note})"


def positions_table(positions: Sequence[dict[str, Any]]) -> str:
    """One row per run of layers that the probe found alike; see `LayerPositions.describe`."""
    lines = [f"{'Layers':<10}{'Positions':<56}{'Longest wavelength':>19}{'Error':>10}"]
    start = 0
    for kind, group in groupby(positions, key=_kind):
        layers = list(group)
        stop = start + len(layers) - 1
        where = f"{start}" if stop == start else f"{start}-{stop}"
        wavelength = layers[0]["longest_wavelength"]
        length = f"{wavelength:,.0f}" if wavelength else "-"
        error = max(layer["max_error"] for layer in layers)
        lines.append(f"{where:<10}{_describe(kind):<56}{length:>19}{error:>10.1e}")
        start = stop + 1
    return "\n".join(lines)


def states_table(states: Sequence[dict[str, Any]]) -> str:
    """One row per kind of layers with states; see `StateLayers.describe`."""
    lines = [f"{'State layers':<32}{'Bytes of a state, each':>24}"]
    kinds = Counter((layer["state"], layer["state_bytes"]) for layer in states)
    lines += [f"{f'{n} of {kind}':<32}{size:>24,}" for (kind, size), n in kinds.items()]
    return "\n".join(lines)


def _any_order(model: str) -> str:
    """Start an engine that composes states; return what its probe says, or why there is none."""
    choreo = {"composed_states": True}
    try:
        llm = start_engine(model, additional_config={"choreo": choreo})
    except ValueError as error:
        return f"Any order: no. {error}"
    try:
        states = llm.collective_rpc("choreo_states")[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
    largest = max(layer["composition_error"] for layer in states)
    size = sum(layer["state_bytes"] for layer in states)
    return (
        "Any order: with additional_config.choreo.composed_states, proven for each layer (largest "
        f"relative error {largest:.1e}); a state takes {size:,} bytes in all layers then"
    )


def _kind(layer: dict[str, Any]) -> tuple[Any, ...]:
    names = ("rope", "rotary_dim", "is_neox", "longest_wavelength", "window", "sinks")
    return tuple(layer[name] for name in names)


def _describe(kind: tuple[Any, ...]) -> str:
    has_rope, rotary_dim, is_neox, _, window, has_sinks = kind
    found = ["no rotation"]
    if has_rope:
        found = ["rotary", f"{rotary_dim} dims", f"{'halves' if is_neox else 'neighbours'} paired"]
    if window:
        found.append(f"window of {window}")
    if has_sinks:
        found.append("sinks")
    return ", ".join(found)


# -- the engine's answers --------------------------------------------------------------------------


def _run_cases(llm: LLM) -> list[tuple[str, CaseRun]]:
    """Run some choreographed calls that no prefix cache could serve, but for the first."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    rng = random.Random(0)
    special = set(llm.get_tokenizer().all_special_ids)
    usable = [i for i in range(llm.model_config.get_vocab_size()) if i not in special]
    params = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    with Choreography(llm) as c:

        def make(
            num_tokens: int,
            parents: Sequence[tuple[CaseRun, int, int, int]] = (),
            new_offset: int = 0,
            is_decode: bool = True,
        ) -> CaseRun:
            arguments: dict[str, Any] = {
                "parents": [(asked.message, start, stop) for asked, start, stop, _ in parents],
                "offsets": [offset for *_, offset in parents],
                "new_offset": new_offset,
            }
            tokens = rng.choices(usable, k=num_tokens)
            if is_decode:
                message = c.decode(tokens, sampling_params=params, **arguments)
            else:
                message = c.prefill(tokens, **arguments)
            read = tuple((asked.made, start, stop, at) for asked, start, stop, at in parents)
            return CaseRun(message, Made(message.token_ids, read, new_offset))

        # Lengths on both sides of a block's, so that there is padding.
        a = make(45, is_decode=False)
        b = make(70, [(a, 0, 45, 0)], 45, is_decode=False)
        in_order = make(4, [(a, 0, 45, 0), (b, 0, 70, 45)], 115)
        return [
            ("parents in order", in_order),
            ("parents reordered", make(4, [(b, 0, 70, 0), (a, 0, 45, 70)], 115)),
            ("gaps between parents", make(4, [(a, 0, 45, 10), (b, 0, 70, 95)], 200)),
            ("parents that overlap", make(4, [(a, 0, 45, 0), (b, 0, 70, 20)], 60)),
            ("part of a parent", make(4, [(b, 3, 68, 0)], 65)),
            ("one parent twice", make(4, [(a, 0, 45, 0), (a, 0, 45, 60)], 105)),
            ("an answer reads an answer", make(4, [(in_order, 0, 12, 0), (a, 0, 45, 12)], 57)),
        ]


def _run_chains(llm: LLM) -> list[tuple[str, CaseRun]]:
    """Run some calls that read chains; each stands for a text, which is what is compared."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    rng = random.Random(0)
    special = set(llm.get_tokenizer().all_special_ids)
    usable = [i for i in range(llm.model_config.get_vocab_size()) if i not in special]
    params = SamplingParams(
        temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    with Choreography(llm) as c:

        def answer(*parents: Message, mode: str = "choreo") -> CaseRun:
            header = rng.choices(usable, k=4)
            message = c.decode(header, parents=[*parents], mode=mode, sampling_params=params)
            read = [token for parent in parents for token in parent.token_ids]
            return CaseRun(message, Made((*read, *message.token_ids)))

        a = c.prefill(rng.choices(usable, k=45))
        b = c.prefill(rng.choices(usable, k=70), parents=[a])
        in_order = answer(a, b)
        first_branch, second_branch = answer(a, b, in_order.message), answer(a, b, in_order.message)
        return [
            ("a chain", in_order),
            ("behind an answer", first_branch),
            ("another branch", second_branch),
            ("another order, mode exact", answer(b, a, mode="exact")),
        ]


# -- HuggingFace's answers -------------------------------------------------------------------------


def _compare(model: str, cases: Sequence[tuple[str, CaseRun]], is_text: bool) -> list[Verdict]:
    """Compare cases, each of which is a text where `is_text` says so."""
    reference = Reference(model)
    return [_verdict(name, asked, reference, is_text) for name, asked in cases]


def _verdict(name: str, run: CaseRun, reference: Reference, is_text: bool) -> Verdict:
    message, made = run.message, run.made
    generated = message.generated_token_ids
    logits = reference.text_logits(made.token_ids) if is_text else reference.logits(made)
    logprobs = logits.log_softmax(-1)
    num_header = len(made.token_ids) - len(generated)
    difference = 0.0
    assert message.logprobs is not None, "its sampling parameters ask for them"
    for row, entries in zip(logprobs[num_header - 1 :], message.logprobs, strict=False):
        for token, entry in entries.items():
            difference = max(difference, abs(float(row[token]) - entry.logprob))
    agreed = len(generated) - num_unlike_greedy(logits, num_header, generated)
    return Verdict(name, agreed, len(generated), difference)


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """One row per choreographed answer."""
    lines = [f"{'Against HuggingFace':<28}{'Same tokens':>12}{'Largest difference':>20}  Verdict"]
    for v in verdicts:
        tokens = f"{v.agreed}/{v.num_tokens}"
        word = "right" if v.is_right else "WRONG"
        lines.append(f"{v.name:<28}{tokens:>12}{v.difference:>20.1e}  {word}")
    lines.append(f"(log-probabilities; {LOGPROB_TOLERANCE:g} is allowed in float32)")
    return "\n".join(lines)
