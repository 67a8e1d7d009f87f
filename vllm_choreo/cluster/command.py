# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo fleet`: several engines behind Ray Serve, on this machine or a cluster of Ray's."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

if TYPE_CHECKING:
    from vllm_choreo.cluster.app import FleetArgs

_APP = "choreo"


def command(parser: argparse.ArgumentParser) -> Main:
    """Serve a model with several engines, as an application of Ray Serve."""
    parser.add_argument("model", metavar="MODEL", help="folder or name of the model")
    parser.add_argument(
        "--engines", type=int, default=2, metavar="N", help="number of engines (default: 2)"
    )
    parser.add_argument(
        "--max-engines",
        type=int,
        metavar="N",
        help="let Serve add engines up to this number, by the calls that run",
    )
    parser.add_argument(
        "--gpus-per-engine", type=float, default=0, metavar="N", help="GPUs that an engine takes"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default: 8000)")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="address of a cluster of Ray's, or auto (default: Ray is started on this machine)",
    )
    parser.add_argument(
        "--vllm",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME[=VALUE]",
        help="options of vllm serve, with underscores; one that is given again has several values",
    )
    return main


def _join_ray(address: str) -> None:
    """Connect to a cluster of Ray's. Raises ChoreoError: none answers there."""
    import ray

    try:
        ray.init(address=address)
    except (ConnectionError, ValueError) as error:
        raise ChoreoError(
            f"no cluster of Ray's answers there ({error}): start one with `ray start --head`, "
            "or leave --address out",
            parameter="--address",
            value=address,
        ) from None


def main(args: argparse.Namespace) -> int:
    """Start the fleet, and serve until a signal ends it.

    Raises:
        ChoreoError: an option is refused, Ray Serve is not there, or the fleet does not start.
    """
    try:
        import ray
        from ray import serve

        from vllm_choreo.cluster.app import build
        from vllm_choreo.cluster.ray_processes import start_ray
    except ImportError as error:
        raise ChoreoError(
            f"a fleet runs on Ray Serve, which is not here ({error}): run "
            "`pip install 'vllm-choreo[fleet]'`, or `vllm serve MODEL --plugin choreo "
            "--data-parallel-size N` for engines on this machine",
            parameter="ray",
        ) from None
    started = args.address is None
    app = build(fleet_args(args))
    if started:
        # Engines of a small machine share its cores.
        start_ray(max(os.cpu_count() or 1, args.engines + 1))
    else:
        _join_ray(args.address)
    try:
        serve.start(http_options={"host": args.host, "port": args.port})
        try:
            serve.run(app, name=_APP)
        except RuntimeError as error:  # in which Serve tells of a replica's
            raise ChoreoError(f"the fleet does not start: {error}") from None
        where = f"http://{args.host}:{args.port}"
        print(f"{args.engines} engines serve {args.model} at {where}", flush=True)
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
    finally:
        serve.delete(_APP)
        if started:
            serve.shutdown()
            ray.shutdown()
    return 0


def fleet_args(args: argparse.Namespace) -> FleetArgs:
    """Arguments of the fleet that the command line asks for.

    Raises:
        ChoreoError: one is refused.
    """
    from pydantic import ValidationError

    from vllm_choreo.cluster.app import FleetArgs

    try:
        return FleetArgs(
            model=args.model,
            engines=args.engines,
            max_engines=args.max_engines,
            num_gpus=args.gpus_per_engine,
            options=options_of(args.vllm),
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ChoreoError(first["msg"], parameter=name, value=first["input"]) from None


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Options of `vllm serve` by name, from words such as `dtype=float32` and `enforce_eager`.

    Raises:
        UnsupportedOptionError: a word that names no option.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier():
            raise UnsupportedOptionError(
                "give options of vllm serve by their names, with underscores, as in "
                "`--vllm dtype=float32 enforce_eager`",
                parameter="--vllm",
                value=word,
            )
        if name in found:
            found[name] = [*_as_list(found[name]), value]
        else:
            found[name] = value if equals else True
    return found


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]
