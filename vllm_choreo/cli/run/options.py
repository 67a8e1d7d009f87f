# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo run`: those of every workflow, and those of each one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from vllm_choreo.cli.run.engine import DEFAULT_MAX_MODEL_LEN
from vllm_choreo.semantics.call import MODES
from vllm_choreo.workflows.prisoners_dilemma import LEAKS, STRATEGIES
from vllm_choreo.workflows.variants import VARIANTS

# What `direct` and the others do, for the help.
WORKFLOWS = {
    "direct": "ask once: an ordinary request, the control of the others",
    "tree_of_thoughts": "candidates in parallel, votes over all of them, an answer",
    "parallel_debate": "agents answer at once, then revise after reading each other",
    "iterative_debate": "two sides speak in turn, a moderator concludes",
    "multi_qa": "two questions, encoded apart, and one answer to both",
    "branch_solve_merge": "two stories with half of the words each, merged into one",
    "prisoners_dilemma": "two agents with secret plans talk, then cooperate or defect",
}

# Arguments of the workflow's function, by its name; those left out keep its defaults.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tree_of_thoughts": {
        "candidates": {"help": "how many thoughts are voted on (default: 8)"},
        "voters": {"help": "how many votes there are (default: 4)"},
    },
    "parallel_debate": {
        "agents": {"help": "how many agents there are (default: 3)"},
        "rounds": {"help": "how often each agent speaks (default: 3)"},
    },
    "iterative_debate": {
        "rounds": {"help": "how often each side may speak (default: 3)"},
    },
    "multi_qa": {
        "variant": {"choices": VARIANTS, "help": "how the questions lie (default: serial)"},
    },
    "branch_solve_merge": {
        "variant": {"choices": VARIANTS, "help": "how the stories lie (default: serial)"},
    },
    "prisoners_dilemma": {
        "strategies": {
            "choices": tuple(STRATEGIES),
            "nargs": 2,
            "help": "what the system prompts of the two agents ask for (default: none none)",
        },
        "leak": {"choices": LEAKS, "help": "what an utterance carries (default: both)"},
        "rounds": {"help": "how often each agent speaks (default: 2)"},
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `run` one subcommand for each workflow."""
    workflows = parser.add_subparsers(dest="workflow", required=True, metavar="WORKFLOW")
    common = _common()
    for workflow, text in WORKFLOWS.items():
        own = workflows.add_parser(workflow, parents=[common], help=text, description=text)
        if workflow != "prisoners_dilemma":
            own.add_argument(
                "--data",
                type=Path,
                metavar="FILE",
                help="problems as JSON lines (default: some made from the seed)",
            )
        for name, settings in OPTIONS.get(workflow, {}).items():
            if "choices" not in settings:
                settings = {"type": positive, "metavar": "N", **settings}
            own.add_argument(f"--{name}", **settings)


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--model", metavar="MODEL", help="model folder or name (default: the small test model)")
    add(
        "--server",
        metavar="URL",
        help="run on a server of `vllm serve MODEL --plugin choreo` (default: on an own engine)",
    )
    add("--api-key", metavar="KEY", help="of the server (default: VLLM_API_KEY)")
    add(
        "--mode",
        choices=(*MODES, "both"),
        default="choreo",
        help="choreo: choreographed, the default; exact: reused only where nothing changes; "
        "baseline: as text; both: choreo and baseline, one after the other",
    )
    add("--limit", type=positive, metavar="N", help="run N problems only (default: 3, or the file)")
    add("--seed", type=natural, metavar="N", help="of the problems and of sampling (default: 0)")
    add("--max-tokens", type=positive, metavar="N", help="of one answer (default: 128)")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="of sampling (default: 0, or 0.7 where calls ask the same)",
    )
    add(
        "--replay",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="transcripts: run the same problems and generate the same tokens",
    )
    add(
        "--max-model-len",
        type=positive,
        metavar="N",
        help=f"the engine's context, in tokens (default: {DEFAULT_MAX_MODEL_LEN})",
    )
    add(
        "--out",
        type=Path,
        default=Path("run-out"),
        metavar="DIR",
        help="folder for the transcripts and index.html (default: %(default)s)",
    )
    return common


def positive(text: str) -> int:
    """An int of at least 1. Raises argparse.ArgumentTypeError: it is none."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """An int of at least 0. Raises argparse.ArgumentTypeError: it is none."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2")
    return value
