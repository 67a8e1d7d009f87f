# SPDX-License-Identifier: Apache-2.0
"""Every facade has the methods of its protocol, with the same arguments.

mypy checks the types of those in the package; here are also those that it does not see.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.lab.notes import Notes
from vllm_choreo import AsyncChoreoClient, AsyncChoreography, ChoreoClient, Choreography
from vllm_choreo.api.protocol import AsyncFacade, Facade, SessionFacade
from vllm_choreo.lab.record.replay import Replay
from vllm_choreo.semantics.call_options import ReadOptions
from vllm_choreo.testing.script import Script


def _members(protocol: type) -> list[str]:
    own = [base for base in protocol.__mro__ if base.__module__ == protocol.__module__]
    names = {name for base in own for name in vars(base)}
    special = {"__enter__", "__exit__", "__aenter__", "__aexit__"}
    return sorted(name for name in names if not name.startswith("_") or name in special)


def _names(method: Any) -> list[str]:
    return [f"{p.kind.name} {p.name}" for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(
    ("facade", "protocol"),
    [
        (Choreography, SessionFacade),
        (ChoreoClient, SessionFacade),
        (AsyncChoreography, AsyncFacade),
        (AsyncChoreoClient, AsyncFacade),
        (Replay, Facade),
        (Script, Facade),
        (Notes, Facade),
    ],
)
def test_a_facade_has_the_methods_of_its_protocol(facade: type, protocol: type) -> None:
    for name in _members(protocol):
        expected = getattr(protocol, name)
        if isinstance(expected, property):
            continue  # an attribute of the object, or a property
        if name not in ("__exit__", "__aexit__"):
            assert _names(getattr(facade, name)) == _names(expected), name
        is_coroutine = inspect.iscoroutinefunction(getattr(facade, name))
        assert is_coroutine == inspect.iscoroutinefunction(expected), name


def test_unknown_options_are_errors_of_the_program() -> None:
    c = Choreography.__new__(Choreography)
    c._denied = ()
    with pytest.raises(TypeError, match="parent"):
        c.decode("x", parent=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sampling_params"):
        c.prefill("x", sampling_params=None)  # type: ignore[call-arg]
    assert "parents" in ReadOptions.__annotations__
