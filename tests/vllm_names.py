# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM that tests use, and that moved between the supported versions."""

from __future__ import annotations

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser

__all__ = ["make_arg_parser"]
