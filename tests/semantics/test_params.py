# SPDX-License-Identifier: Apache-2.0
"""ChoreoParams: the wire form is read back as it was written, and nothing else is accepted."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

from vllm_choreo.errors import (
    ChoreoError,
    OffsetError,
    SpanError,
    UnknownMessageError,
    error_from_report,
)
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.params import ChoreoParams

FULL = ChoreoParams(
    parents=(ParentSpan("s/0"), ParentSpan("s/1", 2, 5), ParentSpan("s/1", None, 3)),
    offsets=(0, None, 7),
    new_offset=40,
    save_as="s/name",
    kind="prefill",
    session="s",
)


@pytest.mark.parametrize("params", [ChoreoParams(), FULL], ids=["defaults", "full"])
def test_wire_form_survives_json(params: ChoreoParams) -> None:
    extra_args = json.loads(json.dumps(params.to_extra_args()))
    assert ChoreoParams.from_extra_args(extra_args) == params
    assert ChoreoParams.from_extra_args(extra_args["choreo"]) == params


def test_wire_form_is_the_documented_one() -> None:
    assert FULL.to_extra_args() == {
        "choreo": {
            "parents": [["s/0", None, None], ["s/1", 2, 5], ["s/1", None, 3]],
            "offsets": [0, None, 7],
            "new_offset": 40,
            "save_as": "s/name",
            "kind": "prefill",
            "session": "s",
        }
    }


def test_bare_ids_and_other_extra_args_are_accepted() -> None:
    params = ChoreoParams.from_extra_args({"other": 1, "choreo": {"parents": ["a", ["b", 0, 2]]}})
    assert params == ChoreoParams(parents=(ParentSpan("a"), ParentSpan("b", 0, 2)))


@pytest.mark.parametrize(
    ("wire", "error", "parameter"),
    [
        ({"parent": []}, ChoreoError, "choreo.parent"),
        ({"parents": "a"}, ChoreoError, "parents"),
        ({"parents": [3]}, ChoreoError, "parents"),
        ({"parents": [["a", 1]]}, ChoreoError, "parents"),
        ({"parents": [["", None, None]]}, ChoreoError, "parents"),
        ({"parents": [["a", 2, 2]]}, SpanError, "parents"),
        ({"parents": [["a", -1, 2]]}, SpanError, "parents"),
        ({"parents": [["a", None, 0]]}, SpanError, "parents"),
        ({"parents": [["a", True, 2]]}, SpanError, "parents"),
        ({"parents": [["a", 0, 2.0]]}, SpanError, "parents"),
        ({"parents": ["a"], "offsets": [0, 1]}, OffsetError, "offsets"),
        ({"parents": ["a"], "offsets": []}, OffsetError, "offsets"),
        ({"parents": ["a"], "offsets": [-1]}, OffsetError, "offsets"),
        ({"parents": ["a", "b"], "offsets": [None]}, OffsetError, "offsets"),
        ({"parents": ["a", "b"], "offsets": [None, -1]}, OffsetError, "offsets"),
        ({"parents": ["a"], "offsets": [True]}, OffsetError, "offsets"),
        ({"parents": ["a"], "offsets": [1.0]}, OffsetError, "offsets"),
        ({"parents": ["a"], "offsets": 0}, OffsetError, "offsets"),
        ({"new_offset": -1}, OffsetError, "new_offset"),
        ({"new_offset": False}, OffsetError, "new_offset"),
        ({"new_offset": "3"}, OffsetError, "new_offset"),
        ({"save_as": ""}, ChoreoError, "save_as"),
        ({"save_as": 3}, ChoreoError, "save_as"),
        ({"kind": "encode"}, ChoreoError, "kind"),
        ({"session": None}, ChoreoError, "session"),
        ([], ChoreoError, "choreo"),
    ],
)
def test_bad_wire_forms_are_refused(wire: object, error: type[ChoreoError], parameter: str) -> None:
    with pytest.raises(error) as caught:
        ChoreoParams.from_extra_args({"choreo": wire})
    assert type(caught.value) is error
    assert caught.value.parameter == parameter


def test_apply_clones_and_keeps_other_extra_args() -> None:
    from vllm import SamplingParams

    given = SamplingParams(max_tokens=3, extra_args={"other": 1})
    applied = FULL.apply(given)
    assert given.extra_args == {"other": 1}
    assert applied.extra_args == {"other": 1, **FULL.to_extra_args()}
    assert applied.max_tokens == 3


def test_errors_survive_report_and_pickle() -> None:
    error = UnknownMessageError("name another one", parameter="parents", value=("a", 1))
    again = error_from_report(json.loads(json.dumps(error.to_report())))
    pickled = pickle.loads(pickle.dumps(error))
    for copy in (again, pickled):
        assert type(copy) is UnknownMessageError
        assert (copy.parameter, copy.message) == ("parents", "name another one")
        assert str(copy) == str(error) == "name another one (parents=('a', 1))"


def test_an_unknown_error_type_is_still_an_error() -> None:
    error = error_from_report({"type": "NewError", "message": "no", "parameter": "p", "value": "v"})
    assert type(error) is ChoreoError
    assert str(error) == "NewError: no (p=v)"


def test_client_modules_load_neither_torch_nor_vllm() -> None:
    names = ("errors", "semantics.params", "semantics.message", "api.session", "api.baseline")
    names += ("semantics.call", "wire.calls", "wire.messages", "wire.refusals", "client")
    names += ("api.choreography", "api.async_choreography", "workflows.parallel_debate")
    names += ("workflows.tree_of_thoughts", "store.store", "store.exact", "store.host_tier")
    imports = "; ".join(f"import vllm_choreo.{name}" for name in names)
    code = f"import sys; {imports}; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_client_imports_nothing_of_the_facades_in_process() -> None:
    code = (
        "import sys, vllm_choreo.client; "
        "rooms = ('api', 'store', 'engine', 'ops', 'server'); "
        "print([m for m in sys.modules if m.startswith(tuple(f'vllm_choreo.{r}' for r in rooms))])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
