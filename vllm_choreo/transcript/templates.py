# SPDX-License-Identifier: Apache-2.0
"""Jinja2 templates of pages, which lie beside the modules that fill them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def template_environment(*packages: str) -> Environment:
    """Make the environment of pages: text is escaped, and a name that is not there is an error.

    Args:
        packages: names of packages with templates besides those of this one.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    folders = [PackageLoader(name, "") for name in (*packages, "vllm_choreo.transcript")]
    environment = Environment(
        loader=ChoiceLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Of `tojson`: what a page shows has an order.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
