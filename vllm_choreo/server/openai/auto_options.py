# SPDX-License-Identifier: Apache-2.0
"""`choreo_auto`: the options of a request, by keys or by a header."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from vllm_choreo.chat.matching import check_auto, check_context, check_cut
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError
from vllm_choreo.repair.rules import rule_given
from vllm_choreo.server.guard import choreo_keys

AUTO_KEY, MIN_TOKENS_KEY, REPAIR_KEY = "choreo_auto", "choreo_auto_min_tokens", "choreo_repair"
CUT_KEY, CONTEXT_KEY = "choreo_auto_cut", "choreo_auto_context"
AUTO_KEYS = (AUTO_KEY, MIN_TOKENS_KEY, CUT_KEY, CONTEXT_KEY, REPAIR_KEY)
logger = init_logger("vllm.choreo.server")
# For clients that cannot send `vllm_xargs`.
AUTO_HEADER = "X-Choreo-Auto"


@dataclass(frozen=True)
class AutoOptions:
    """Options of a request whose messages are to be found.

    Attributes:
        mode: "exact", "choreo" or "off".
        is_asked: the request itself names the mode: what cannot be done is refused then. Where only
            the server's default names it, the chat is served as text.
        min_tokens: tokens of a part, at least; shorter parts are joined; None: the default.
        cut: where parts end, "messages" or "content"; None: the default.
        context: behind what parts are encoded, "seen" or "alone"; None: the default.
        repair: rule of the call that generates, in mode "choreo".
    """

    mode: str
    is_asked: bool = False
    min_tokens: int | None = None
    cut: str | None = None
    context: str | None = None
    repair: object = None


def read_options(
    xargs: dict[str, Any] | None, header: str | None, default: str
) -> AutoOptions | None:
    """Read the options of a request; None: it names its messages, or none are to be found.

    Args:
        xargs: its `vllm_xargs`.
        header: the value of its header `AUTO_HEADER`.
        default: the server's mode for requests that say none.

    Raises:
        ChoreoError: a key without its form, or beside which there is no `choreo_auto`.
    """
    keys = choreo_keys(xargs)
    if AUTO_KEY not in keys:
        if keys:
            return None  # it names its messages itself, whatever the default is
        if header is not None:
            return AutoOptions(check_auto(header, AUTO_HEADER), is_asked=True)
        return AutoOptions(default) if default != "off" else None
    assert xargs is not None
    mode = check_auto(xargs[AUTO_KEY], "auto")
    for key in keys:
        if key not in AUTO_KEYS:
            raise UnsupportedOptionError(
                "with choreo_auto the messages of the chat are found by what they hold: leave "
                "this out, or leave choreo_auto out",
                parameter=f"vllm_xargs.{key}",
                value=xargs[key],
            )
    context, repair = xargs.get(CONTEXT_KEY), xargs.get(REPAIR_KEY)
    if repair is not None and mode != "choreo":
        raise UnsupportedOptionError('repair is of mode "choreo"', parameter="repair", value=repair)
    return AutoOptions(
        mode,
        is_asked=True,
        min_tokens=_min_tokens(xargs.get(MIN_TOKENS_KEY)),
        cut=check_cut(xargs[CUT_KEY], "auto_cut") if CUT_KEY in xargs else None,
        context=check_context(context, "auto_context", mode) if CONTEXT_KEY in xargs else None,
        repair=rule_given(repair) if isinstance(repair, str) else repair,
    )


def default_context(chosen: str, auto: str, has_keys: bool) -> str:
    """Return behind what parts of chats are encoded in mode "choreo"; log what to know of it.

    Args:
        chosen: the option `--choreo-auto-context`, or else the setting `server.auto_context`; "":
            neither is given.
        auto: the server's mode of chats.
        has_keys: the server asks for API keys. Without, all its clients are one tenant, and each
            finds what the others have sent.
    """
    context = chosen or ("seen" if has_keys else "alone")
    if auto == "choreo" and not has_keys:
        if context == "alone":
            logger.info(
                "choreo: without API keys all clients share their messages, so parts of chats are "
                'encoded behind the system message alone (context "alone"): no conversation steers '
                "another"
            )
        else:
            logger.warning(
                "choreo: without API keys all clients share their messages, and with the setting "
                'server.auto_context="seen" what one client sends can steer the answers of '
                'another: choose "alone", or give --api-key'
            )
    return context


def _min_tokens(given: int | None) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise ChoreoError("an int > 0 is needed", parameter="auto_min_tokens", value=given)
    return given
