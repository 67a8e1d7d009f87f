# SPDX-License-Identifier: Apache-2.0
"""`--role ROLE=MODEL` of `vllm-choreo run`: roles that other models play than the run's own.

In process, and by name on a server, models are adapters. With `--server` they may also be addresses
of servers of other models that exchange messages with that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.adapters import WithAdapter
from vllm_choreo.cli.engine import LocalEngine, RemoteEngine
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.by_role import AdaptersByRole, ServersByRole

if TYPE_CHECKING:
    from vllm import SamplingParams

# Roles of the messages of each workflow, those of its prompts included.
ROLES: dict[str, tuple[str, ...]] = {
    "direct": ("answer",),
    "tree_of_thoughts": (
        *("question", "ballot", "finish", "voter"),
        *("candidate", "vote", "answer"),
    ),
    "parallel_debate": ("question", "revise", "agent", "answer"),
    "iterative_debate": (
        *("question", "affirmative", "negative", "moderator", "judge", "conclude"),
        *("round", "verdict", "answer"),
    ),
    "multi_qa": ("question", "system", "answer"),
    "document_qa": ("instruction", "document", "answer"),
    "branch_solve_merge": ("branch", "story", "merge prompt", "merge"),
    "code_review": ("question", "coder", "tester", "reviewer", "code", "tests", "answer"),
    "function_calls": (
        *("functions", "coder", "tester", "reviewer", "request", "results"),
        *("calls", "remark", "rest"),
    ),
    "prisoners_dilemma": ("rules", "system", "plan", "utterance", "prediction", "decision"),
}
Players = dict[str, tuple[str, ...]]


def add_roles(parser: argparse.ArgumentParser) -> None:
    """Add the argument; it may be given for several roles."""
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE=MODEL",
        help="who makes the calls of a role (docs/variants.md): the folder of an adapter; with "
        "--server the name of one, or the URL of another server; several with commas take turns",
    )


def players_of(args: argparse.Namespace) -> Players:
    """Players of each role, as the command line names them.

    Raises:
        ChoreoError: no such role in the workflow, no players, or what they cannot play.
    """
    players: Players = {}
    for text in args.role:
        role, _, given = text.partition("=")
        those = tuple(filter(None, given.split(",")))
        if role not in ROLES[args.workflow] or role in players or not those:
            raise ChoreoError(
                f"give each role once, as ROLE=MODEL; those of {args.workflow} are "
                f"{', '.join(ROLES[args.workflow])}",
                parameter="--role",
                value=text,
            )
        players[role] = those
    if players:
        _check_players(args, [one for those in players.values() for one in those])
    return players


def _check_players(args: argparse.Namespace, those: Sequence[str]) -> None:
    if args.mode not in ("choreo", "exact"):
        raise ChoreoError(
            f"runs in mode {args.mode} are of one model: leave out --role, or run in mode choreo "
            "or exact",
            parameter="--role",
            value=args.mode,
        )
    servers = [one for one in those if _is_url(one)]
    if servers and (args.server is None or len(servers) < len(those)):
        raise ChoreoError(
            "servers play roles beside that of --server, and adapters roles of one server, or "
            "without a server: name servers alone, or adapters alone",
            parameter="--role",
            value=servers[0],
        )


def role_adapters(players: Players) -> list[Path]:
    """Folders of the adapters that play roles on an engine of this process."""
    return list(dict.fromkeys(Path(one) for those in players.values() for one in those))


@dataclass(frozen=True)
class RoleEngine:
    """An engine on whose sessions roles are played by others.

    Attributes:
        engine: the engine, or server, that makes the calls of all other roles.
        players: adapters, or addresses of servers, that play each role.
    """

    engine: LocalEngine | RemoteEngine
    players: Players

    def open(self, mode: str) -> AdaptersByRole | ServersByRole:
        """Open a session; it makes messages and frees them, and no more."""
        others = [one for those in self.players.values() for one in those if _is_url(one)]
        if others:
            return self._on_servers(mode, list(dict.fromkeys(others)))
        is_remote = isinstance(self.engine, RemoteEngine)
        adapters: dict[str, list[object]] = {
            # A folder says which of its role's calls use it.
            role: [one if is_remote else WithAdapter(Path(one)) for one in those]
            for role, those in self.players.items()
        }
        return AdaptersByRole(self.engine.open(mode), adapters)

    def _on_servers(self, mode: str, urls: Sequence[str]) -> ServersByRole:
        assert isinstance(self.engine, RemoteEngine), "servers play beside a server"
        numbers = {url: number for number, url in enumerate(urls, start=1)}
        with ExitStack() as opened:
            clients = [self.engine.open(mode)]
            opened.push(clients[0])
            for url in urls:
                clients.append(RemoteEngine(url, self.engine.api_key).open(mode))
                opened.push(clients[-1])
            opened.pop_all()  # they end with the session
        players = {role: [numbers[url] for url in those] for role, those in self.players.items()}
        return ServersByRole(clients, players)

    def sampling(self, **fields: object) -> SamplingParams | dict[str, Any]:
        return self.engine.sampling(**fields)

    def facts(self, modes: Sequence[str]) -> dict[str, str]:
        return {**self.engine.facts(modes), "roles": _text(self.players)}


def _text(players: Mapping[str, Sequence[str]]) -> str:
    """Describe who plays each role, for the page."""
    short = {
        role: [one if _is_url(one) else Path(one).name for one in those]
        for role, those in players.items()
    }
    return "; ".join(f"{role}: {', '.join(those)}" for role, those in short.items())


def _is_url(text: str) -> bool:
    return "://" in text
