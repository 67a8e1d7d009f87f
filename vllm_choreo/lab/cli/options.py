# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo run`: those of every workflow, and those of each one."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, Literal

from vllm_choreo.api.pair_rules import PairRules
from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.numbers import natural, positive
from vllm_choreo.lab.cli.roles import add_roles
from vllm_choreo.lab.cli.sets import DEFAULT_MAX_TOKENS, DEFAULT_SHORT_TOKENS, SETS
from vllm_choreo.lab.workflows.prisoners_dilemma import LEAKS, NAMES, STRATEGIES
from vllm_choreo.lab.workflows.variants import LAYOUTS, VARIANTS
from vllm_choreo.repair.rules import rule_given
from vllm_choreo.repair.session_rules import names_file, session_rule
from vllm_choreo.semantics.call import MODES
from vllm_choreo.semantics.session_options import RepairGiven
from vllm_choreo.trained_adapter import PLACEMENTS, current_placement

# What `direct` and the others do, for the help.
WORKFLOWS = {
    "direct": "ask once: an ordinary request, the control of the others",
    "tree_of_thoughts": "candidates in parallel, votes over all of them, an answer",
    "parallel_debate": "agents answer at once, then revise after reading each other",
    "iterative_debate": "two sides speak in turn, a moderator concludes",
    "multi_qa": "two questions, encoded apart, and one answer to both",
    "document_qa": "documents, encoded apart, and one answer from all of them",
    "branch_solve_merge": "two stories with half of the words each, merged into one",
    "code_review": "a coder, a tester and a reviewer write a function",
    "function_calls": "a coder, a tester and a reviewer call functions for a user",
    "prisoners_dilemma": "two agents with secret plans talk, then cooperate or defect",
}

_RESTATE: dict[str, Any] = {
    "restate": {
        "action": "store_true",
        "default": None,
        "help": "ask the question once more after what is read (default: False)",
    }
}
_LAYOUT: dict[str, Any] = {
    "layout": {
        "choices": LAYOUTS,
        "help": "order of what calls read: this project's, or the paper's (default: standard)",
    }
}
# Arguments of the workflow's function, by its name; those left out keep its defaults.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "tree_of_thoughts": {
        "candidates": {"help": "how many thoughts are voted on (default: 8)"},
        "voters": {"help": "how many votes there are (default: 4)"},
        **_RESTATE,
        **_LAYOUT,
    },
    "parallel_debate": {
        "agents": {"help": "how many agents there are (default: 3)"},
        "rounds": {"help": "how often each agent speaks (default: 3)"},
        **_RESTATE,
        **_LAYOUT,
    },
    "iterative_debate": {
        "rounds": {"help": "how often each side may speak (default: 3)"},
        **_RESTATE,
        **_LAYOUT,
    },
    "multi_qa": {
        "variant": {"choices": VARIANTS, "help": "how the questions lie (default: serial)"},
        **_LAYOUT,
    },
    "document_qa": {
        "pasted": {
            "action": "store_true",
            "default": None,
            "help": "documents and question in one turn (default: False)",
        },
        "shuffled": {
            "action": "store_true",
            "default": None,
            "help": "documents in an order drawn by the question (default: False)",
        },
    },
    "branch_solve_merge": {
        "variant": {"choices": VARIANTS, "help": "how the stories lie (default: serial)"},
        **_LAYOUT,
    },
    "prisoners_dilemma": {
        "strategies": {
            "choices": tuple(STRATEGIES),
            "nargs": 2,
            "help": "what the system prompts of the two agents ask for (default: none none)",
        },
        "leak": {"choices": LEAKS, "help": "what an utterance carries (default: both)"},
        "rounds": {"help": "how often each agent speaks (default: 2)"},
        "first": {
            "choices": NAMES,
            "help": "who speaks first; where it is left out, games take turns (default: Alice)",
        },
        "predict": {
            "action": "store_true",
            "default": None,
            "help": "Bob says what Alice will do before he decides (default: False)",
        },
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `run` one subcommand for each workflow."""
    parser.set_defaults(logprobs=None)
    common = argparse.ArgumentParser(add_help=False)
    add_model(common)
    _add_server(common)
    common.add_argument(
        "--mode",
        choices=(*MODES, "both"),
        default="choreo",
        help="choreo: choreographed, the default; exact: reused only where nothing changes; "
        "baseline: as text; both: choreo and baseline, one after the other",
    )
    _add_adapter(common)
    add_roles(common)
    add_repair(common, "of choreographed runs")
    add_sampling(common, None, "0, or 0.7 where calls ask the same")
    common.add_argument(
        "--replay",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="transcripts: run the same problems and generate the same tokens",
    )
    add_out(common, "run-out", "folder for the transcripts and index.html")
    add_workflows(parser, common)


def add_workflows(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add one subcommand for each workflow: its own arguments, and those of `common`."""
    workflows = parser.add_subparsers(dest="workflow", required=True, metavar="WORKFLOW")
    for workflow, text in WORKFLOWS.items():
        own = workflows.add_parser(workflow, parents=[common], help=text, description=text)
        if workflow != "prisoners_dilemma":
            _add_problems(own, tuple(SETS.get(workflow, ())))
        for name, settings in OPTIONS.get(workflow, {}).items():
            if not {"choices", "action"} & settings.keys():
                settings = {"type": positive, "metavar": "N", **settings}
            own.add_argument(f"--{name}", **settings)


def _add_problems(parser: argparse.ArgumentParser, sets: tuple[str, ...]) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="problems as JSON lines"
        + (" (default: some made from the seed)" if sets else ", without which there are none"),
    )
    parser.set_defaults(set=None)
    if len(sets) > 1:
        parser.add_argument(
            "--set", choices=sets, help=f"which problems are made (default: {sets[0]})"
        )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server",
        metavar="URL",
        help="run on a server of `vllm serve MODEL --plugin choreo` (default: on an own engine)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the server (default: VLLM_API_KEY)")


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter",
        metavar="DIR",
        help="folder of an adapter (docs/training.md) that choreographed runs use; with --server "
        "the name under which it serves one",
    )
    parser.add_argument(
        "--placement",
        type=current_placement,
        choices=PLACEMENTS,
        help="which calls use the adapter (default: as training has written into its folder)",
    )


def add_repair(
    parser: argparse.ArgumentParser, of: str, action: Literal["store", "append"] = "store"
) -> None:
    """Add an argument for a rule of repair, or for several; `of` says of which runs."""
    parser.add_argument(
        "--repair",
        metavar="RULE",
        help=f"which tokens of its parents a call encodes anew (docs/repair.md), {of}: "
        "first:32, all, as JSON, the file of a policy or a pair, or a folder of pairs",
        action=action,
        default=[] if action == "append" else None,
    )


def add_together(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    """Add an argument for the number of problems side by side; `what` says what that does."""
    parser.add_argument(
        "--together",
        type=positive,
        metavar="N",
        default=default,
        help=f"problems that are run side by side: {what} (default: %(default)s)",
    )


def repair_of(text: str) -> RepairGiven:
    """The rule that an argument gives, as `Choreography` takes it.

    Raises:
        RepairError: the text gives no rule, or runs, which are those of one call.
    """
    if Path(text).is_dir():
        PairRules.in_folder(Path(text))
        return Path(text)
    given = text if names_file(text) else rule_given(text)
    session_rule(given, "choreo")
    assert not isinstance(given, list), "runs are refused"
    return given


def add_sampling(parser: argparse.ArgumentParser, temperature: float | None, default: str) -> None:
    """Add arguments for the number of problems and for sampling; `default` is of `temperature`."""
    add = parser.add_argument
    add("--limit", type=positive, metavar="N", help="run N problems only (default: 3, or the file)")
    add("--seed", type=natural, metavar="N", help="of the problems and of sampling (default: 0)")
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help=f"of one answer (default: {DEFAULT_MAX_TOKENS}, or as the problems need)",
    )
    add(
        "--short-tokens",
        type=positive,
        metavar="N",
        help="of a vote, a verdict or a decision (default: as an answer, at most "
        f"{DEFAULT_SHORT_TOKENS})",
    )
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        default=temperature,
        help=f"of sampling (default: {default})",
    )
    add(
        "--top-p",
        type=_share,
        metavar="P",
        help="sample from the likeliest tokens that have this probability together (default: 1)",
    )


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and up to 1")
    return value


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 2")
    return value
