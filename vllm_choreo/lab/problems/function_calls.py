# SPDX-License-Identifier: Apache-2.0
"""Requests that are met by calling functions, turn after turn, as in BFCL. Kind "calls".

The functions, and the judge of what was called, are those of the Berkeley Function Calling
Leaderboard (Patil et al., 2025; package `bfcl-eval`): simulations of file systems, shops and the
like, each in a state of its own. Of what a model writes only calls of functions that the problem
names are run, and only with literals as arguments.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from vllm_choreo.errors import ChoreoError

_JUDGE = "eval_checker.multi_turn_eval.multi_turn_"
_LIST = re.compile(r"\[")
# What each description of a simulation's function repeats, before what that function does.
_TOOL = "Tool description: "


class SimulatedFunctions:
    """Functions of a scenario, in the state that it begins with.

    Args:
        scenario: a row of BFCL, of which `id`, `involved_classes` and `initial_config`, and
            `excluded_function` if it is there, are read.

    Attributes:
        text: a line for each function, with its arguments: what a model is told of them.

    Raises:
        ChoreoError: the package `bfcl-eval` is missing, or does not know a class or its state.
    """

    def __init__(self, scenario: Mapping[str, Any]) -> None:
        places = _bfcl("constants.executable_backend_config")
        self._methods: dict[str, Callable[..., object]] = {}
        lines = []
        for name in scenario["involved_classes"]:
            if name not in places.CLASS_FILE_PATH_MAPPING:
                raise ChoreoError(
                    f"bfcl-eval has no functions of this name; it has "
                    f"{', '.join(places.CLASS_FILE_PATH_MAPPING)}",
                    parameter="involved_classes",
                    value=name,
                )
            simulation = getattr(
                importlib.import_module(places.CLASS_FILE_PATH_MAPPING[name]), name
            )()
            if name not in places.STATELESS_CLASSES:
                _begin(simulation._load_scenario, name, scenario)
            for described in _descriptions(places.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]):
                if described["name"] not in scenario.get("excluded_function", ()):
                    self._methods[described["name"]] = getattr(simulation, described["name"])
                    lines.append(_line(described))
        self.text = "\n".join(lines)

    def __contains__(self, call: str) -> bool:
        """Tell if a call, as `calls_in` finds it, is of one of the functions."""
        return call.partition("(")[0] in self._methods

    def run(self, call: str) -> str:
        """Run a call, and return what it gives as text, or what is wrong with it."""
        name = call.partition("(")[0]
        if call not in self:
            return f"Error: no function {name}"
        found = ast.parse(call, mode="eval").body
        assert isinstance(found, ast.Call)
        arguments = [ast.literal_eval(value) for value in found.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in found.keywords}
        try:
            result = self._methods[name](*arguments, **named)
        except Exception as error:  # whatever a simulation raises, the model is told
            return f"Error: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


def _begin(load: Callable[..., object], name: str, scenario: Mapping[str, Any]) -> None:
    """Set the simulation of a class to the state with which a scenario begins."""
    state = scenario["initial_config"].get(name, {})
    try:
        load(copy.deepcopy(state), long_context="long_context" in scenario["id"])
    except Exception as error:  # whatever a state of another form makes of it
        raise ChoreoError(
            f"not a state that bfcl-eval's {name} can begin with "
            f"({type(error).__name__}: {error}); its own files of problems have such states",
            parameter=f"initial_config.{name}",
            value=state,
        ) from error


def calls_in(text: str) -> list[str]:
    """The calls of the first list of calls in what a model says; none if there is no such list.

    A call is a name with literals in brackets, as Python writes it.
    """
    for begin in _LIST.finditer(text):
        for end in range(len(text), begin.start(), -1):
            if text[end - 1] == "]" and (calls := _calls(text[begin.start() : end])) is not None:
                return calls
    return []


def _calls(text: str) -> list[str] | None:
    try:
        found = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(found, ast.List) or not all(map(_is_plain, found.elts)):
        return None
    return [ast.unparse(call) for call in found.elts]


def _is_plain(call: ast.expr) -> bool:
    """Tell if an expression is a call by name, with literals alone."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return False
    if any(one.arg is None for one in call.keywords):
        return False
    try:
        for value in (*call.args, *(one.value for one in call.keywords)):
            ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def share_met(text: str, scenario: str, wanted: str) -> float:
    """Share of the requests that were met, from the first one to the first that was not.

    Args:
        text: calls that were made, as JSON: for each request a list of lists of them; or what a
            model says to the first request.
        scenario: see `SimulatedFunctions`, as JSON.
        wanted: calls that meet each request, as JSON.

    Raises:
        ChoreoError: see `SimulatedFunctions`.
    """
    row, right = json.loads(scenario), json.loads(wanted)
    known = SimulatedFunctions(row)
    # The judge evaluates what it is given, whoever wrote it.
    made = [
        [
            [one for call in step for one in calls_in(f"[{call}]") if one in known]
            for step in request
        ]
        for request in _made(text)
    ]
    made += [[]] * (len(right) - len(made))
    check = _bfcl(f"{_JUDGE}checker").multi_turn_checker
    met = 0
    while met < len(right):
        with _simulations() as name:
            if not check(made, right[: met + 1], row, "", name)["valid"]:
                break
        met += 1
    return met / len(right)


def _made(text: str) -> list[list[list[str]]]:
    """Calls of each step of each request; those of a model's own words are of one step."""
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return [[calls_in(text)]]
    try:
        return msgspec.convert(made, list[list[list[str]]])
    except msgspec.ValidationError:
        return [[calls_in(text)]]


@contextmanager
def _simulations() -> Iterator[str]:
    """A name under which the judge keeps its simulations, in its module, for so long."""
    name = f"run_{secrets.token_hex(8)}"
    kept = vars(_bfcl(f"{_JUDGE}utils"))
    try:
        yield name
    finally:
        for key in [key for key in kept if key.startswith(name)]:
            del kept[key]


def _bfcl(module: str = "") -> ModuleType:
    """A module of the package `bfcl-eval`."""
    try:
        return importlib.import_module(f"bfcl_eval.{module}" if module else "bfcl_eval")
    except ImportError as error:
        raise ChoreoError(
            f"the functions of these problems are BFCL's, which are not installed ({error}): pip "
            "install --no-deps bfcl-eval, with mpmath beside it",
            parameter="data",
        ) from error


@functools.cache
def _descriptions(file: str) -> Sequence[Mapping[str, Any]]:
    """Descriptions of a simulation's functions."""
    (folder,) = _bfcl().__path__
    path = Path(folder, "data", "multi_turn_func_doc", file)
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _line(function: Mapping[str, Any]) -> str:
    """A function in one line: its arguments, those that may be left out with ``?``, and its use."""
    given = function["parameters"]
    needed = given.get("required", ())
    arguments = ", ".join(
        f"{name}{'' if name in needed else '?'}: {about['type']}"
        for name, about in given["properties"].items()
    )
    use = function["description"].partition(_TOOL)[2] or function["description"]
    return f"{function['name']}({arguments}): {use}"
