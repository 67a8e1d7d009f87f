# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo doctor`: is choreography right for this model, on this machine?

Three questions: how do positions enter each attention layer (the probe that every engine runs at
its start); which attention kernel runs; and do choreographed calls give what HuggingFace gives?

The last one knows nothing of rotations, neither the probe's nor anybody's. A key at another
position is had by encoding the message anew with everything that it attends to shifted along,
which by definition changes nothing else: HuggingFace places the keys itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_choreo.errors import ChoreoError

# Float32 on both sides; one wrong position costs a hundred times as much.
LOGPROB_TOLERANCE = 2e-3
# Where HuggingFace's two best tokens are closer than this, either is right.
TIE = 1e-3
ANSWER_TOKENS = 8
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, eq=False)
class Made:
    """A message as it was asked for, to be encoded by HuggingFace.

    Attributes:
        handle: the engine's `Message`.
        parents: `(message, start, stop, offset)`.
        new_offset: position of its first token.
    """

    handle: Any
    parents: tuple[tuple[Made, int, int, int], ...]
    new_offset: int


@dataclass(frozen=True)
class Verdict:
    """How one choreographed answer compares.

    Attributes:
        agreed, num_tokens: of the generated tokens, those that HuggingFace chooses as well.
        difference: largest difference in log-probability over the five best tokens of each.
    """

    name: str
    agreed: int
    num_tokens: int
    difference: float

    @property
    def is_right(self) -> bool:
        return self.agreed == self.num_tokens and self.difference <= LOGPROB_TOLERANCE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `main` takes."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model folder or name (default: the small test model)",
    )


def main(args: argparse.Namespace) -> int:
    """Examine a model and print what was found.

    Args:
        args: `model`, a folder or name, or None for the small test model.

    Returns:
        The exit status: 0 if all answers agree, 1 if one does not or the engine refuses the model.
    """
    from vllm_choreo.smallmodel.embedded import embedded_model

    model = args.model or str(embedded_model())
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
        cases = _run_cases(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
    verdicts = _compare(model, cases)
    print(verdicts_table(verdicts))
    if all(verdict.is_right for verdict in verdicts):
        print("\nChoreography is right for this model.")
        return 0
    print("\nvllm-choreo: some answers differ; do not use this model.", file=sys.stderr)
    return 1


def start_engine(model: str) -> Any:
    """A `vllm.LLM` in this process: float32, quiet, no compilation.

    Raises:
        ValueError: vLLM or choreography refuses the model; says why.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # HuggingFace runs in the same process later: bound threads would wait for one another.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm_choreo

    vllm_choreo.register()
    from transformers import AutoConfig
    from vllm import LLM

    known = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", MAX_MODEL_LEN)
    return LLM(
        model,
        dtype="float32",
        max_model_len=min(MAX_MODEL_LEN, known),
        enforce_eager=True,
        enable_prefix_caching=True,
        use_tqdm_on_load=False,
        seed=0,
    )


def _kernel() -> str:
    from vllm_choreo.ops import default_impl

    impl = default_impl()
    note = "C++" if impl == "cpu" else "plain PyTorch, many times slower: build the C++ kernels"
    return f"Attention: {impl} ({note})"


def positions_table(positions: Sequence[dict[str, Any]]) -> str:
    """One row per run of layers that the probe found alike; see `LayerPositions.describe`."""
    lines = [f"{'Layers':<10}{'Positions':<34}{'Longest wavelength':>19}{'Error':>10}"]
    start = 0
    for kind, group in groupby(positions, key=_kind):
        layers = list(group)
        stop = start + len(layers) - 1
        where = f"{start}" if stop == start else f"{start}-{stop}"
        wavelength = layers[0]["longest_wavelength"]
        length = f"{wavelength:,.0f}" if wavelength else "-"
        error = max(layer["max_error"] for layer in layers)
        lines.append(f"{where:<10}{_describe(kind):<34}{length:>19}{error:>10.1e}")
        start = stop + 1
    return "\n".join(lines)


def _kind(layer: dict[str, Any]) -> tuple[Any, ...]:
    return layer["rope"], layer["rotary_dim"], layer["is_neox"], layer["longest_wavelength"]


def _describe(kind: tuple[Any, ...]) -> str:
    has_rope, rotary_dim, is_neox, _ = kind
    if not has_rope:
        return "no rotation"
    return f"rotary, {rotary_dim} dims, {'halves' if is_neox else 'neighbours'} paired"


# -- the engine's answers --------------------------------------------------------------------------


def _run_cases(llm: Any) -> list[tuple[str, Made]]:
    """A handful of choreographed calls that no prefix cache could serve, but for the first."""
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
            parents: Sequence[tuple[Made, int, int, int]] = (),
            new_offset: int = 0,
            is_decode: bool = True,
        ) -> Made:
            arguments: dict[str, Any] = {
                "parents": [(m.handle, start, stop) for m, start, stop, _ in parents],
                "offsets": [offset for *_, offset in parents],
                "new_offset": new_offset,
            }
            tokens = rng.choices(usable, k=num_tokens)
            if is_decode:
                handle = c.decode(tokens, sampling_params=params, **arguments)
            else:
                handle = c.prefill(tokens, **arguments)
            return Made(handle, tuple(parents), new_offset)

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


# -- HuggingFace's answers -------------------------------------------------------------------------


def _compare(model: str, cases: Sequence[tuple[str, Made]]) -> list[Verdict]:
    import inspect

    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    reference = (
        _untouched_class(model)
        .from_pretrained(model, dtype="float32", attn_implementation="eager")
        .eval()
    )
    if "position_ids" not in inspect.signature(reference.forward).parameters:
        raise ChoreoError(
            "HuggingFace's model takes no positions, so its answers cannot be compared; the probe "
            "above is all that the doctor can say of it",
            parameter="model",
            value=Path(model).name,
        )
    memo: dict[tuple[Made, int], tuple[Any, Any]] = {}
    return [_verdict(name, made, reference, memo) for name, made in cases]


def _untouched_class(model: str) -> Any:
    """HuggingFace's class of the model, from a fresh copy of its module.

    Where vLLM runs a model on HuggingFace's own classes, it decorates them for its compilation,
    after which they work within an engine alone.
    """
    import importlib.util

    from transformers import AutoConfig, AutoModelForCausalLM

    public = AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(model))]
    spec = importlib.util.find_spec(public.__module__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, public.__name__)


def _verdict(name: str, made: Made, reference: Any, memo: dict[Any, Any]) -> Verdict:
    message = made.handle
    logprobs = _encode(reference, made, made.new_offset, memo)[1].log_softmax(-1)
    num_header = message.num_tokens - len(message.generated_token_ids)
    agreed, difference = 0, 0.0
    for i, token in enumerate(message.generated_token_ids):
        row = logprobs[num_header + i - 1]
        agreed += bool(row.max() - row[token] <= TIE)
        for other, entry in message.logprobs[i].items():
            difference = max(difference, abs(float(row[other]) - entry.logprob))
    return Verdict(name, agreed, len(message.generated_token_ids), difference)


def _encode(reference: Any, made: Made, at: int, memo: dict[Any, Any]) -> tuple[Any, Any]:
    """Encode a message and all that it attends to, shifted so that it begins at position `at`.

    Args:
        memo: what was encoded before, by message and position.

    Returns:
        Its keys and values, `(key, value)` per layer, float32 `[1, num_kv_heads, n, head_size]`;
        and its logits, float32 `[n, vocab_size]`.
    """
    import torch
    from transformers import DynamicCache

    if (made, at) in memo:
        return memo[made, at]
    cache, shift = DynamicCache(), at - made.new_offset
    num_past = 0
    for parent, start, stop, offset in made.parents:
        encoded, _ = _encode(reference, parent, offset + shift - start, memo)
        for layer, (key, value) in enumerate(encoded):
            cache.update(key[:, :, start:stop], value[:, :, start:stop], layer)
        num_past += stop - start
    tokens = torch.tensor([made.handle.token_ids])
    num_tokens = tokens.shape[1]
    hidden = torch.full((num_tokens, num_tokens), torch.finfo(torch.float32).min).triu(1)
    mask = torch.cat([torch.zeros(num_tokens, num_past), hidden], dim=1)
    with torch.inference_mode():
        logits = reference(
            input_ids=tokens,
            attention_mask=mask[None, None],
            position_ids=torch.arange(at, at + num_tokens)[None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
    own = [(layer.keys[:, :, num_past:], layer.values[:, :, num_past:]) for layer in cache.layers]
    memo[made, at] = own, logits
    return own, logits


def verdicts_table(verdicts: Sequence[Verdict]) -> str:
    """One row per choreographed answer."""
    lines = [f"{'Against HuggingFace':<28}{'Same tokens':>12}{'Largest difference':>20}  Verdict"]
    for v in verdicts:
        tokens = f"{v.agreed}/{v.num_tokens}"
        word = "right" if v.is_right else "WRONG"
        lines.append(f"{v.name:<28}{tokens:>12}{v.difference:>20.1e}  {word}")
    lines.append(f"(log-probabilities; {LOGPROB_TOLERANCE:g} is allowed in float32)")
    return "\n".join(lines)
