# SPDX-License-Identifier: Apache-2.0
"""Messages that are loaded into one of several engines: recipes by which any could make them."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_choreo.api.fleet_snapshots import loaded_messages
from vllm_choreo.errors import UnsupportedOptionError


def test_a_message_that_no_call_could_make_again_is_not_loaded() -> None:
    entry = {
        "message": "s/a",
        "is_copy": False,
        "tokens": [1, 2],
        "parents": [],
        "spans": [],
        "new_offset": 0,
        "weights": None,
        "patch": None,
        "adapter": None,
        "keeps": [],
        "is_untrusted": False,
        "data": {},
    }
    child = {**entry, "message": "s/b", "parents": [0], "spans": [[0, 2, 5]], "new_offset": 7}

    def loaded(first: Any, named: Any) -> Any:
        return loaded_messages("s", "t", {"encodings": [first, {**child, "data": None}]}, named)

    ((made, has_data),) = loaded(entry, {"s/b": 1})
    assert not has_data and made.id == "s/b"
    (parent,) = made.parents
    assert parent.id.startswith("s/loaded-") and parent.call.token_ids == (1, 2)
    assert made.call.params.offsets == (5,) and made.call.params.new_offset == 7
    patch = {"source": 0, "start": 0, "runs": [[0, 1]], "layers": None}
    for wrong, reason in (
        ({"patch": patch}, "repaired"),
        ({"weights": [1.0, 2.0]}, "repaired"),
        ({"adapter": 0}, "an adapter"),
        ({"is_untrusted": True}, "somebody whose key"),
    ):
        with pytest.raises(UnsupportedOptionError, match=reason) as refused:
            loaded({**entry, **wrong}, {"s/b": 1})
        assert refused.value.value == "s/a"
        assert loaded({**entry, **wrong}, {}) == []  # what nobody needs hinders nobody
