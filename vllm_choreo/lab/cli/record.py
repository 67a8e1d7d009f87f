# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo record`: a workflow on many problems, as text, for `vllm-choreo train`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import DEFAULT_MAX_MODEL_LEN, LocalEngine, start_engine
from vllm_choreo.cli.numbers import natural
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import OPTIONS, add_sampling, add_together, add_workflows
from vllm_choreo.lab.cli.task import Task, about_task, program_of
from vllm_choreo.lab.cli.tasks import tasks_of
from vllm_choreo.lab.record.recording import PARTS, SHARES, Recorder
from vllm_choreo.lab.workflows.together import run_together
from vllm_choreo.trained_adapter import ModelIdentity

MODES = ("baseline", "exact")
DEFAULT_LIKELIEST = 64
DEFAULT_TOGETHER = 8


def command(parser: argparse.ArgumentParser) -> Main:
    """Run a workflow on many problems as text and record it, for training.

    The parser is given one subcommand for each workflow.
    """
    parser.set_defaults(server=None, replay=None)
    common = argparse.ArgumentParser(add_help=False)
    add_model(common)
    common.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="baseline: as text, the default; exact: messages are reused where nothing changes",
    )
    # What is drawn at temperature 1 is what the model says, the unlikely included.
    add_sampling(common, 1.0, "1: what the model says, as often as it says it")
    common.add_argument(
        "--likeliest",
        dest="logprobs",
        type=natural,
        metavar="K",
        default=DEFAULT_LIKELIEST,
        help="tokens whose log-probabilities are kept at every token, for the loss kl; 0: none "
        "(default: %(default)s)",
    )
    common.add_argument(
        "--shares",
        type=float,
        nargs=len(PARTS),
        default=SHARES,
        metavar=tuple(part.upper() for part in PARTS),
        help=f"of the runs, for {', '.join(PARTS)} (default: {' '.join(map(str, SHARES))})",
    )
    add_together(common, DEFAULT_TOGETHER, "a step decodes for all of them")
    add_out(common, "recorded", "folder for the runs; an interrupted recording goes on")
    add_workflows(parser, common)
    return main


def main(args: argparse.Namespace) -> int:
    """Record runs; one folder out.

    Raises:
        ChoreoError: the arguments do not make sense, the folder holds other runs, the engine does
            not start, or no run succeeds.
    """
    from vllm_choreo.testing.models.embedded import model_folder

    tasks = tasks_of(args)
    model = model_folder(args.model)
    recorder = Recorder(args.out, ModelIdentity.of(model), args.mode, args.shares, _settings(args))
    places = [(recorder.place(_problems(task)), task) for task in tasks]
    left = [(path, task) for path, task in places if not path.exists()]
    errors = _record(args, model, recorder, left) if left else []
    print(_summary(args.out, [path for path, _ in places if path.exists()], errors))
    return 1 if errors else 0


def _record(
    args: argparse.Namespace, model: str, recorder: Recorder, left: Sequence[tuple[Path, Task]]
) -> list[str]:
    """Run what is left; return the errors of runs that failed."""
    from tqdm import tqdm

    llm = start_engine(
        model, args.max_model_len or DEFAULT_MAX_MODEL_LEN, max_logprobs=max(20, args.logprobs)
    )
    engine, program = LocalEngine(llm), program_of(args.workflow)
    errors: list[str] = []
    with tqdm(total=len(left), desc=f"recording {args.workflow}", unit="run") as bar:
        for start in range(0, len(left), args.together):
            some = left[start : start + args.together]
            with engine.open(args.mode) as c:
                runs = run_together(c, [partial(program, **task.inputs) for _, task in some])
            for (path, task), ran in zip(some, runs, strict=True):
                if isinstance(ran, ChoreoError):
                    errors.append(f"{task.id}: {ran}")
                else:
                    recorder.save(path, ran, _problems(task), {"task": about_task(task)})
            bar.update(len(some))
    return errors


def _problems(task: Task) -> list[str]:
    """Digests that tell the problems of a task from all others; a game is one by itself."""
    texts = ["\n".join([problem.question, *problem.documents]) for problem in task.problems]
    return [blake2b(text.encode(), digest_size=16).hexdigest() for text in texts or [task.id]]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that all runs have in common, but for their number: more may be added later."""
    names = ["workflow", "seed", "temperature", "max_tokens", "logprobs"]
    names += [name for name in ("set", *OPTIONS.get(args.workflow, {})) if hasattr(args, name)]
    names += [name for name in ("short_tokens", "top_p") if getattr(args, name)]
    settings = {name: getattr(args, name) for name in names}
    if args.chat_template:
        settings["chat_template"] = args.chat_template.name
    data = getattr(args, "data", None)
    return {**settings, "data": None if data is None else data.name}


def _summary(out: Path, recorded: Sequence[Path], errors: Sequence[str]) -> str:
    counts = Counter(path.parent.name for path in recorded)
    lines = [f"{out}: " + ", ".join(f"{part} {counts[part]}" for part in PARTS)]
    return "\n".join([*lines, *(f"not recorded: {error}" for error in errors)])
