# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo evaluate`, and what is refused before an engine starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import DEFAULT_MAX_MODEL_LEN, memory_for, start_engine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import OPTIONS, add_repair, add_sampling, add_together
from vllm_choreo.lab.cli.run import make_folder
from vllm_choreo.lab.study.arguments import add_problems
from vllm_choreo.lab.study.sets import HeldOutSet, sets_of
from vllm_choreo.trained_adapter import PLACEMENTS, current_placement


def command(parser: argparse.ArgumentParser) -> Main:
    """Judge choreography and adapters against the text; a page of it."""
    add = parser.add_argument
    add(
        "recorded",
        type=Path,
        nargs="*",
        metavar="RECORDED",
        help="folders of `vllm-choreo record`, of which the runs in test/ are taken; several show "
        "how adapters transfer",
    )
    add_problems(parser, "on problems of its own")
    add(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of an adapter that the workflow uses; several are compared",
    )
    add(
        "--direct",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="folder of an adapter for one direct call in place of the workflow: trained on runs "
        "of `direct` with the workflow's answers, it is the control of a choreography",
    )
    add(
        "--placement",
        type=current_placement,
        choices=PLACEMENTS,
        help="which calls use adapters whose folders do not say so",
    )
    add_repair(parser, "of one more arm; several are compared", "append")
    add(
        "--restate",
        action="store_true",
        help="two more arms, text and choreographed, that ask the question once more after what is "
        "read: costs as many tokens, and reads nothing anew",
    )
    add(
        "--no-kl",
        action="store_true",
        help="judge answers alone, and not the distance to the text, which takes as long again",
    )
    add_together(
        parser, 1, "much faster on CPU; times to the first token are then of so many at a time"
    )
    add_model(parser)
    add_sampling(parser, None, "0, or 0.7 where calls ask the same")
    add_out(parser, "evaluation", "folder for the numbers and index.html")
    return main


def _check_restated(is_asked: bool, sets: Sequence[HeldOutSet]) -> None:
    for one in sets:
        if is_asked and "restate" not in OPTIONS.get(one.workflow, {}):
            raise ChoreoError(
                f"{one.workflow} has its question after what is read, or none: leave out --restate",
                parameter="restate",
            )


def main(args: argparse.Namespace) -> int:
    """Judge; the exit status: 0, or 1 if a problem failed.

    Raises:
        ChoreoError: the arguments do not make sense, or the engine does not start.
    """
    from vllm_choreo.lab.study.evaluate.arms import arms_of
    from vllm_choreo.lab.study.evaluate.judging import judge_all, judged_sets

    sets = sets_of(args)
    arms = arms_of(args.adapter, args.direct, args.placement, args.repair, restates=args.restate)
    _check_restated(args.restate, sets)
    judged = judged_sets(sets, arms, is_direct_asked=bool(args.direct))
    make_folder(args.out)
    folders = [arm.adapter for arm in arms if arm.adapter is not None]
    max_model_len = args.max_model_len or DEFAULT_MAX_MODEL_LEN
    memory = memory_for(arm.repair for arm in arms)
    llm = start_engine(args.model, max_model_len, True, folders, **memory)
    return judge_all(llm, judged, args.out, measures_kl=not args.no_kl, num_together=args.together)
