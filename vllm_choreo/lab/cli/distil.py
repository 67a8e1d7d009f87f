# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo distil`: recorded runs as direct calls with their answers: the control."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_choreo.cli.arguments import add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.record.recording import Recorder, Recording
from vllm_choreo.lab.workflows.distilled import as_direct
from vllm_choreo.trained_adapter import ModelIdentity


def command(parser: argparse.ArgumentParser) -> Main:
    """Turn recorded runs into direct calls with their answers, a control to train."""
    parser.add_argument(
        "recorded", type=Path, metavar="RECORDED", help="folder of `vllm-choreo record`"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )
    add_out(parser, "distilled", "folder for the direct calls, to be trained on with --loss ce")
    return main


def main(args: argparse.Namespace) -> int:
    """Write a recording of direct calls, each in the part where its run was; the exit status, 0.

    Raises:
        ChoreoError: RECORDED cannot be read, is of another model, or is of a workflow that has no
            one question.
    """
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import model_folder

    recording = Recording.load(args.recorded)
    model = model_folder(args.model)
    if not recording.base.same_as(ModelIdentity.of(model)):
        raise ChoreoError(
            f"the runs are those of {recording.base.name}: name that model",
            parameter="model",
            value=model,
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    about = {"workflow": "direct", "answers_of": recording.digest}
    recorder = Recorder(args.out, recording.base, recording.mode, settings=about)
    for part, runs in recording.parts.items():
        for run in runs:
            direct = as_direct(
                run.transcript, lambda text: tokenizer.encode(text, add_special_tokens=False)
            )
            recorder.save(args.out / run.name, direct, run.problems)
        print(f"{args.out / part}: {len(runs)}")
    return 0
