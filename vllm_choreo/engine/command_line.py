# SPDX-License-Identifier: Apache-2.0
"""`vllm serve MODEL --plugin choreo`: plugins by name, an option that vLLM's command line lacks.

vLLM takes names from the environment variable `VLLM_PLUGINS` alone, and reads it in every process
of an engine. The option puts its names there, before any engine is configured.
"""

from __future__ import annotations

import argparse
import os
from importlib.metadata import entry_points
from typing import Any

PLUGIN = "choreo"

_AUTO = ("exact", "choreo", "off")
_AUTO_CUTS = ("messages", "content")
_AUTO_CONTEXTS = ("seen", "alone")
_VARIABLE = "VLLM_PLUGINS"
_SERVERS = "api_server_count"
# Set where a command line of vLLM is parsed, and inherited by the processes of its engines.
_ONLY_IF_NAMED = "CHOREO_ONLY_IF_NAMED"
_GENERAL = "vllm.general_plugins"
_ENDPOINTS = "vllm.endpoint_plugins"
# What vLLM loads from while the variable is not set; from `_ENDPOINTS` it loads named plugins only.
_BY_DEFAULT = (
    _GENERAL,
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
# Among these, and yet without effect on the command line unless named. The other one downloads what
# a request asks for.
_NEVER_IMPLIED = (PLUGIN, "lora_hf_hub_resolver")


def is_active() -> bool:
    """Return whether engines configured in this process, or in its parent, choreograph.

    In a program that makes its engine itself (`LLM(...)`) an installed plugin is active. On vLLM's
    command line it is active if `--plugin` or the variable names it.
    """
    return PLUGIN in _named() or _ONLY_IF_NAMED not in os.environ


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--plugin NAME` and the plugin's options to the parser of a vLLM command."""
    os.environ[_ONLY_IF_NAMED] = "1"
    parser.add_argument(
        "--plugin",
        metavar="NAME",
        action=_NamePlugin,
        help="Load the plugin NAME, with its HTTP routes if it has any; may be given again. Adds "
        f"to {_VARIABLE}. Installed plugins: {', '.join(_installed())}.",
    )
    parser.add_argument(
        "--choreo-schema",
        metavar="FILE",
        action="append",
        help="With --plugin choreo: register the schemas of prompts in FILE (docs/pml.md) for all "
        "API keys, and encode them; may be given again.",
    )
    parser.add_argument(
        "--choreo-keep",
        metavar="DIR",
        help="With --plugin choreo: let clients save messages in DIR (a path, or a URL of "
        "fsspec's), each API key in a folder of its own (docs/keep.md).",
    )
    parser.add_argument(
        "--choreo-load",
        metavar="DIR",
        help="With --plugin choreo: load what was saved in DIR by --choreo-keep, and open its "
        "sessions again, for each API key its own.",
    )
    parser.add_argument(
        "--choreo-pair",
        metavar="PATH",
        help="With --plugin choreo: the profile of this model and another one, or of two of its "
        "adapters, or a folder of such profiles (docs/variants.md), by which sessions read unless "
        "they say otherwise. With --choreo-keep, what clients of the other server name is found by "
        "those of this one.",
    )
    parser.add_argument(
        "--choreo-page",
        action="store_true",
        help="With --plugin choreo: serve a page at /choreo/ on which messages and calls are tried "
        "by hand, and the page and the KV blocks of a session (docs/operating.md).",
    )
    parser.add_argument(
        "--choreo-auto",
        choices=_AUTO,
        default="off",
        help="With --plugin choreo: what becomes of the messages of chats that name none "
        "(docs/on-ramps.md), where a request does not say. exact: reused where the answer is that "
        "of plain text; choreo: reused wherever they stand. Default: %(default)s.",
    )
    parser.add_argument(
        "--choreo-auto-cut",
        choices=_AUTO_CUTS,
        default="messages",
        help="With --choreo-auto: where the parts of a chat end that are reused. messages: behind "
        "its messages; content: also inside long ones, where their content says so, so that a "
        "document is found wherever it was pasted. Default: %(default)s.",
    )
    parser.add_argument(
        "--choreo-auto-context",
        choices=_AUTO_CONTEXTS,
        help="With --choreo-auto choreo: behind what the parts of a chat are encoded. seen: what "
        "stood before them when they were first seen; alone: the system messages of their own chat "
        "alone, so that no conversation steers another. Default: the setting server.auto_context, "
        "or else seen with API keys and alone without.",
    )


class _NamePlugin(argparse.Action):
    """Action that adds a name to `VLLM_PLUGINS`, beside those that vLLM loads without it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values not in _installed():
            parser.error(
                f"argument {option_string}: no plugin {values!r} is installed; "
                f"installed are {', '.join(_installed())}"
            )
        named = _named() if _VARIABLE in os.environ else _implied(parser, values)
        if values not in named:
            os.environ[_VARIABLE] = ",".join((*named, values))
            # General plugins have been loaded before, and have seen that they were not named.
            for plugin in entry_points(group=_GENERAL, name=values):
                plugin.load()()
        if values == PLUGIN and getattr(namespace, _SERVERS, 1) is None:
            setattr(namespace, _SERVERS, 1)  # else vLLM starts one for each engine
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or ()), values])


def _implied(parser: argparse.ArgumentParser, chosen: str) -> list[str]:
    """Names of the plugins that vLLM loads by default, which naming `chosen` alone would drop."""
    by_default = {p.name for group in _BY_DEFAULT for p in entry_points(group=group)}
    by_default -= {*_NEVER_IMPLIED, chosen}
    exposed = sorted(by_default & {p.name for p in entry_points(group=_ENDPOINTS)})
    if exposed:
        parser.error(
            f"argument --plugin: {', '.join(exposed)} would be named too, and would add HTTP "
            f"routes; set {_VARIABLE} to the plugins that you want"
        )
    return sorted(by_default)


def _named() -> list[str]:
    return [name for name in os.environ.get(_VARIABLE, "").split(",") if name]


def _installed() -> list[str]:
    groups = (*_BY_DEFAULT, _ENDPOINTS)
    return sorted({plugin.name for group in groups for plugin in entry_points(group=group)})
