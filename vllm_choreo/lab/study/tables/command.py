# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm-choreo tables`, and the table from the first run to the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.cli.arguments import add_model, add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import DEFAULT_MAX_MODEL_LEN, LocalEngine, start_engine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import add_sampling, add_together
from vllm_choreo.lab.cli.run import make_folder
from vllm_choreo.lab.study.tables.definitions import TABLES, PaperTable
from vllm_choreo.trained_adapter import PLACEMENTS, ModelIdentity, current_placement

if TYPE_CHECKING:
    from vllm_choreo.lab.cli.task import Task
    from vllm_choreo.lab.study.arms import Arm
    from vllm_choreo.lab.study.tables.log import RunLog

DEFAULT_GAMES = 100
# Arguments that no single run depends on; of what the parser adds of its own, too.
_NO_SETTINGS = {
    *("adapter", "direct", "placement", "draw", "together", "limit", "out", "max_model_len"),
    *("main", "point", "command"),
}


def command(parser: argparse.ArgumentParser) -> Main:
    """Run a table of the paper Prompt Choreography on a model; a killed run goes on."""
    add = parser.add_argument
    tables = "; ".join(
        f"{name} ({one.number or 'not of the paper'}): {one.text}" for name, one in TABLES.items()
    )
    add("table", choices=tuple(TABLES), metavar="TABLE", help=f"by its workflow. {tables}")
    add("--data", type=Path, metavar="FILE", help="problems as JSON lines; games need none")
    for name, text in (
        ("--adapter", "folder of an adapter that the workflow uses; several are compared"),
        ("--direct", "folder of an adapter for one direct call in place of the workflow"),
    ):
        add(name, type=Path, action="append", default=[], metavar="DIR", help=text)
    add(
        "--placement",
        type=current_placement,
        choices=PLACEMENTS,
        help="which calls use adapters whose folders do not say so",
    )
    add("--draw", action="store_true", help="draw what has been run so far, and run nothing")
    add_together(
        parser, 1, "much faster on CPU; times to the first token are then of so many at a time"
    )
    add_model(parser)
    add_sampling(parser, None, "0.7, as in the paper")
    add_out(parser, "tables", "each table has a folder of its own in this one")
    return main


def main(args: argparse.Namespace) -> int:
    """Run a table; the exit status: 0, or 1 if a run failed.

    Raises:
        ChoreoError: the arguments do not make sense, the folder has other runs, or the engine does
            not start.
    """
    from vllm_choreo.lab.study.tables.arms import table_arms
    from vllm_choreo.lab.study.tables.log import RunLog
    from vllm_choreo.lab.study.tables.running import run_missing

    table = TABLES[args.table]
    groups = table.grouped(_tasks(args, table))
    arms = table_arms(table, args.adapter, args.direct, args.placement)
    settings = _settings(args, table)
    out = args.out / args.table
    make_folder(out)
    log = RunLog(out, settings)
    if args.draw:
        return _draw(table, groups, arms, log, out, _facts(settings), [])
    folders = [arm.adapter for arm in arms if arm.adapter is not None]
    max_model_len = args.max_model_len or DEFAULT_MAX_MODEL_LEN
    llm = start_engine(args.model, max_model_len, False, folders)
    facts = {**LocalEngine(llm).facts(()), **_facts(settings)}
    tasks = [task for group in groups.values() for task in group]
    errors: list[str] = []
    try:
        errors += run_missing(llm, table, tasks, arms, log, args.together)
    finally:
        # After Ctrl-C too: what is complete is shown.
        status = _draw(table, groups, arms, log, out, facts, errors)
    return status


def _tasks(args: argparse.Namespace, table: PaperTable) -> Sequence[Task]:
    from vllm_choreo.lab.study.sets import sets_of

    if table.data and args.data is None:
        raise ChoreoError(f"{args.table} needs a file of {table.data}: name it with --data FILE")
    if not table.data and args.data is not None:
        raise ChoreoError(f"{args.table} has no problems but its games: leave out --data")
    if args.data is not None and not args.data.is_file():
        raise ChoreoError("cannot read it: no such file", parameter="--data", value=str(args.data))
    asked = {
        **vars(args),
        "recorded": [],
        "workflow": table.workflow,
        "set": None,
        "limit": args.limit or (None if table.data else DEFAULT_GAMES),
        "max_tokens": args.max_tokens or table.max_tokens,
        "temperature": table.temperature if args.temperature is None else args.temperature,
    }
    (found,) = sets_of(argparse.Namespace(**asked))
    return found.tasks


def _settings(args: argparse.Namespace, table: PaperTable) -> dict[str, Any]:
    """All that runs depend on besides task and arm; more problems and arms may be added later."""
    from vllm_choreo.lab.study.tables.log import file_digest
    from vllm_choreo.testing.models.embedded import model_folder

    model = ModelIdentity.of(model_folder(args.model))
    files = {"data": args.data, "chat_template": args.chat_template}
    sampling = {name: getattr(args, name) for name in sorted(vars(args).keys() - _NO_SETTINGS)}
    return {
        **sampling,
        "model": model.name,
        "weights": model.weights,
        **{name: path and file_digest(path) for name, path in files.items()},
        "seed": args.seed or 0,
        "temperature": table.temperature if args.temperature is None else args.temperature,
        "max_tokens": args.max_tokens or table.max_tokens,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, str]:
    shown = {name: str(settings[name]) for name in ("model", "temperature", "seed")}
    return {**shown, "tokens": f"at most {settings['max_tokens']} per answer"}


def _draw(
    table: PaperTable,
    groups: Mapping[str, Sequence[Task]],
    arms: Sequence[Arm],
    log: RunLog,
    out: Path,
    facts: Mapping[str, str],
    errors: Sequence[str],
) -> int:
    """Write the page of what there is, print the table and the errors; the exit status."""
    from vllm_choreo.lab.study.tables.running import judged_sets, write_table

    sets = judged_sets(table, groups, arms, log)
    if sets:
        print(write_table(sets, facts, out))
        print(f"\nOpen {out / 'index.html'}")
    else:
        print("No problem has been run with all arms yet.")
    for error in errors:
        print(f"vllm-choreo: {error}", file=sys.stderr)
    return 1 if errors else 0
