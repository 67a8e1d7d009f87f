# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo run`: runs the tasks one after the other and saves each as soon as it is done."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import (
    DEFAULT_MAX_MODEL_LEN,
    Engine,
    LocalEngine,
    RemoteEngine,
    memory_for,
    start_engine,
    warm_up,
)
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.options import add_arguments, repair_of
from vllm_choreo.lab.cli.report import Result, facts_of, save_page, save_transcript, table
from vllm_choreo.lab.cli.roles import Players, RoleEngine, players_of, role_adapters
from vllm_choreo.lab.cli.task import Task, program_of
from vllm_choreo.lab.cli.tasks import tasks_of
from vllm_choreo.transcript.transcript import Step, Transcript


def command(parser: argparse.ArgumentParser) -> Main:
    """Run a workflow on problems; write transcripts and a page that shows them."""
    add_arguments(parser)
    return main


def main(args: argparse.Namespace) -> int:
    """Run a workflow, print a table, write transcripts and a page.

    Args:
        args: see `vllm_choreo.lab.cli.options`.

    Returns:
        The exit status: 0, or 1 if a task failed.

    Raises:
        ChoreoError: the arguments do not make sense, or the engine does not start.
    """
    _check_server(args)
    options, players = _options(args), players_of(args)
    tasks = tasks_of(args)
    make_folder(args.out)
    own = _engine(args, options, players)
    engine: Engine = RoleEngine(own, players) if players else own
    return run_tasks(engine, tasks, args.workflow, modes_of(args.mode), args.out)


def _check_server(args: argparse.Namespace) -> None:
    """Refuse arguments that do not go together."""
    if args.server is None:
        if args.api_key is not None:
            raise ChoreoError("--api-key is for a server: give --server, too")
        return
    if args.replay:
        raise ChoreoError(
            "a replay forces tokens, which needs an engine of its own: leave out --server"
        )
    for name in ("model", "max_model_len", "chat_template"):
        if getattr(args, name) is not None:
            raise ChoreoError(f"a server has its own: leave out --{name.replace('_', '-')}")


def _engine(
    args: argparse.Namespace, options: Mapping[str, Any], players: Players
) -> LocalEngine | RemoteEngine:
    if args.server is not None:
        api_key = args.api_key or os.environ.get("VLLM_API_KEY")
        return RemoteEngine(args.server, api_key, options)
    max_model_len = args.max_model_len or DEFAULT_MAX_MODEL_LEN
    adapters = [options["adapter"]] if "adapter" in options else []
    adapters = list(dict.fromkeys([*adapters, *role_adapters(players)]))
    memory = memory_for([options.get("repair")])
    llm = start_engine(args.model, max_model_len, bool(args.replay), adapters, **memory)
    return LocalEngine(llm, options)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of choreographed runs; refuses those of no run, and a placement of no adapter."""
    if args.placement is not None and args.adapter is None:
        raise ChoreoError("--placement is that of an adapter: give --adapter, too")
    options = {
        name: getattr(args, name)
        for name in ("adapter", "placement", "repair")
        if getattr(args, name) is not None
    }
    if options and "choreo" not in modes_of(args.mode):
        raise ChoreoError(
            f"runs in mode {args.mode} are the model's alone: leave out --{next(iter(options))}, "
            "or run in mode choreo"
        )
    if "adapter" in options and args.server is None:
        options["adapter"] = Path(args.adapter)
    if "repair" in options:
        options["repair"] = repair_of(args.repair)
    return options


def modes_of(mode: str) -> tuple[str, ...]:
    """The modes that a run takes, in turn."""
    return ("choreo", "baseline") if mode == "both" else (mode,)


def run_tasks(
    engine: Engine, tasks: Sequence[Task], workflow: str, modes: Sequence[str], out: Path
) -> int:
    """Run every task in every mode on an engine.

    Args:
        engine: an engine in this process, or a server.
        tasks: at least one.
        workflow: the name of its function.
        modes: modes of `Choreography`.
        out: an existing folder for the transcripts and `index.html`.

    Returns:
        The exit status: 0, or 1 if a task failed.
    """
    warm_up(engine, modes)
    facts = facts_of(engine.facts(modes), modes, tasks[0])
    results: list[Result] = []
    errors: list[str] = []
    try:
        _run_all(engine, tasks, workflow, modes, out, results, errors)
    finally:
        # After Ctrl-C too: what is complete is shown.
        if results:
            save_page(workflow, results, facts, out / "index.html")
            print(table(results))
            print(f"\nOpen {out / 'index.html'}")
        for error in errors:
            print(f"vllm-choreo: {error}", file=sys.stderr)
    return 1 if errors else 0


def _run_all(
    engine: Engine,
    tasks: Sequence[Task],
    workflow: str,
    modes: Sequence[str],
    out: Path,
    results: list[Result],
    errors: list[str],
) -> None:
    """Run every task in every mode; append to `results` and `errors`."""
    from tqdm import tqdm

    with tqdm(unit=" call", leave=False) as bar:
        for number, task in enumerate(tasks, start=1):
            for mode in modes:
                bar.set_description(f"{workflow} {number}/{len(tasks)}, {mode}")
                try:
                    transcript = _run(engine, task, workflow, mode, lambda step: bar.update())
                except ChoreoError as error:
                    errors.append(f"{task.id}, {mode}: {error}")
                    continue
                results.append(Result(task, transcript, task.is_right(transcript.answers)))
                save_transcript(results[-1], out / _file_name(number, len(tasks), mode, modes))
                # The runs to come will make about as many calls as those before.
                bar.total = round(bar.n / len(results) * len(tasks) * len(modes))


def _run(
    engine: Engine, task: Task, workflow: str, mode: str, on_step: Callable[[Step], None]
) -> Transcript:
    from vllm_choreo.lab.record.replay import Replay

    program = program_of(workflow)
    with engine.open(mode) as c:
        if task.recorded is None:
            return program(c, **task.inputs, on_step=on_step)
        with Replay(c, task.recorded) as replay:
            return program(replay, **task.inputs, on_step=on_step)


def _file_name(number: int, num_tasks: int, mode: str, modes: Sequence[str]) -> str:
    """`transcript.json`, with the number if there are several tasks, and the mode likewise."""
    parts = ["transcript"]
    parts += [f"{number:03}"] if num_tasks > 1 else []
    parts += [mode] if len(modes) > 1 else []
    return "-".join(parts) + ".json"


def make_folder(path: Path) -> None:
    """Make a folder and its parents.

    Raises:
        ChoreoError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChoreoError(f"cannot make the folder {path}: {error.strerror}") from error
