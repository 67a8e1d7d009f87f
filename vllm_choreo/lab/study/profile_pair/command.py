# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo profile-pair`, and what is refused before an engine starts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import (
    DEFAULT_MAX_MODEL_LEN,
    LocalEngine,
    memory_for,
    start_engine,
    stop_engine,
    warm_up,
)
from vllm_choreo.errors import AdapterError, ChoreoError
from vllm_choreo.lab.cli.options import add_sampling, add_together
from vllm_choreo.lab.cli.run import make_folder
from vllm_choreo.lab.study.arguments import add_problems, add_target
from vllm_choreo.lab.study.sets import HeldOutSet, halved, sets_of
from vllm_choreo.lab.study.targets import MeasureTarget
from vllm_choreo.repair.pair import Ranges
from vllm_choreo.repair.rules import ByLayers, rule_given, rule_of
from vllm_choreo.trained_adapter import FILE_NAME, PEFT_FILES, TrainedAdapter

DEFAULT_TARGET = "loss=0.1"
THE_MODEL = "none"  # in place of an adapter
TARGETS = ("loss=SHARE", "kl=NATS per token", "ttft=SECONDS")


def command(parser: argparse.ArgumentParser) -> Main:
    """Find which layers one adapter encodes anew of what another has encoded; a profile of it."""
    add = parser.add_argument
    add(
        "writer",
        metavar="WRITER",
        help=f"folder of the adapter that encodes messages ({THE_MODEL}: the model itself), or a "
        "whole model",
    )
    add("reader", metavar="READER", help="of the variant that reads them, of the same kind")
    add(
        "recorded",
        type=Path,
        nargs="*",
        metavar="RECORDED",
        help="folders of `vllm-choreo record`, of which the runs in test/ are taken: the first is "
        "profiled with, the others tell whether its profile is good for them",
    )
    add_problems(parser, "on problems of its own")
    add_target(
        parser,
        DEFAULT_TARGET,
        "what the chosen layers are to reach: loss=SHARE of the distance between plain reading and "
        "the reader's own encoding at most, kl=NATS per token at most, or ttft=SECONDS at most",
    )
    add(
        "--layers",
        action="append",
        metavar="RANGES",
        help="instead of searching: try these alone, as JSON, '[7, 24]' or '[[0, 2], [7, 24]]' "
        "(may be repeated)",
    )
    add(
        "--layer-map",
        action="store_true",
        help="also what each layer gains by itself, and those that gain most together",
    )
    add_together(parser, 1, "with --layers, of adapters; it is faster, and leaves no profile")
    add_model(parser)
    add_sampling(parser, None, "0, or 0.7 where calls ask the same")
    add_out(parser, "pair", "folder for pair.json, the numbers and index.html")
    return main


def main(args: argparse.Namespace) -> int:
    """Profile; the exit status: 0, or 1 if no choice of layers reaches the target.

    Raises:
        ChoreoError: the arguments do not make sense, or the engine does not start.
    """
    from vllm_choreo.lab.study.profile_pair.cell_arms import AdapterPair, Pair
    from vllm_choreo.lab.study.profile_pair.models import ModelPair
    from vllm_choreo.lab.study.profile_pair.results import measure, write_profile
    from vllm_choreo.testing.models.embedded import model_folder

    target, tried = MeasureTarget.given(args.target, TARGETS), _tried(args)
    if args.writer == args.reader:
        raise ChoreoError("writer and reader are the same", parameter="reader", value=args.reader)
    is_models = all(map(_is_model, (args.writer, args.reader)))
    if is_models and args.model:
        raise ChoreoError("writer and reader are models: leave out --model", parameter="model")
    writer, reader = (
        None if is_models else _adapter(given) for given in (args.writer, args.reader)
    )
    if args.together > 1 and (is_models or not tried):
        raise ChoreoError(
            "side by side, problems tell what layers are worth and not what they take: only with "
            "--layers, and with adapters",
            parameter="together",
            value=args.together,
        )
    turns_model = {"model": args.reader} if is_models else {}
    learnt, others = _halves(sets_of(argparse.Namespace(**{**vars(args), **turns_model})))
    make_folder(args.out)
    max_model_len = args.max_model_len or DEFAULT_MAX_MODEL_LEN
    with TemporaryDirectory(dir=args.out, prefix="writer-") as folder:
        pair: Pair
        if is_models:
            written = _written(args.writer, max_model_len, [learnt, *others], Path(folder))
            pair, model = ModelPair(args.writer, args.reader, written), args.reader
        else:
            model = model_folder(args.model)
            pair = AdapterPair(writer, reader, model)
        adapters = [folder for folder in (writer, reader) if folder is not None]
        llm = start_engine(model, max_model_len, True, adapters, **memory_for([{"layers": [0, 1]}]))
        warm_up(LocalEngine(llm), ("baseline", "choreo"))
        options = {"tried": tried, "maps_layers": args.layer_map, "num_together": args.together}
        found = measure(llm, pair, learnt, others, **options)
        is_timed = args.together == 1
        return write_profile(llm, pair, found, target, args.out, is_timed)


def _tried(args: argparse.Namespace) -> tuple[Ranges, ...]:
    """The choices of layers that are given.

    Raises:
        ChoreoError: one names no layers, or a layer map is asked for, too.
    """
    given = args.layers or ()
    if given and args.layer_map:
        raise ChoreoError(
            "a layer map is a part of the search: leave out --layers", parameter="layer_map"
        )
    found = []
    for text in given:
        rule = rule_of(rule_given(f'{{"layers": {text}}}'))
        if not isinstance(rule, ByLayers):
            raise ChoreoError("no layers are tried anyway", parameter="layers", value=text)
        found.append(rule.ranges)
    return tuple(found)


def _written(
    model: str, max_model_len: int, sets: list[HeldOutSet], folder: Path
) -> dict[int, Path]:
    """Encode all problems in the writer's engine, and end it; return the folders of `write_all`."""
    from tqdm import tqdm

    from vllm_choreo.lab.study.profile_pair.models import write_all

    llm = start_engine(model, max_model_len, **memory_for([{"layers": [0, 1]}]))
    num_layers = llm.model_config.hf_text_config.num_hidden_layers
    total = sum(len(one.tasks) for one in sets)
    try:
        with tqdm(total=total, desc="writing", unit="problem", leave=False) as bar:
            return write_all(llm, sets, num_layers, folder, bar.update)
    finally:
        stop_engine(llm)


def _is_model(given: str) -> bool:
    """Return whether `given` is the folder or the name of a model, and not of an adapter."""
    folder = Path(given).expanduser()
    if folder.is_dir():
        return not (folder / PEFT_FILES[0]).exists()
    return given != THE_MODEL and "/" in given


def _adapter(given: str) -> Path | None:
    """Folder of an adapter; None for the model itself.

    Raises:
        AdapterError: it is no folder, or that of an adapter which some calls alone use.
    """
    if given == THE_MODEL:
        return None
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise AdapterError(
            f"a folder of an adapter is needed, or {THE_MODEL} for the model itself",
            parameter="adapter",
            value=given,
        )
    if (folder / FILE_NAME).exists() and TrainedAdapter.load(folder).placement != "both":
        raise AdapterError(
            "a variant encodes and generates, this adapter was trained for one of it alone: train "
            "with --placement both",
            parameter="adapter",
            value=given,
        )
    return folder


def _halves(sets: list[HeldOutSet]) -> tuple[HeldOutSet, list[HeldOutSet]]:
    """Cut the first set in two, to profile with one half; the other and further sets check it.

    Raises:
        ChoreoError: the first set has one problem alone.
    """
    first, *others = sets
    learnt, kept_back = halved(first.tasks, "problems", "2 or more", "limit")
    checked = replace(first, name=f"{first.name}, kept back", tasks=kept_back)
    return replace(first, tasks=learnt), [checked, *others]
