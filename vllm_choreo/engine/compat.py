# SPDX-License-Identifier: Apache-2.0
"""Supported versions of vLLM, and the differences between them.

`make check-vllm VERSION=…` compares what this package uses of vLLM with another version. Where two
supported versions differ, the code is written so that it serves both, and says here how:

| since | what | where |
| --- | --- | --- |
| 0.33.0 | the scheduler hands `get_computed_blocks` a bound on the hit | `scheduler/block_manager.py` takes and forwards what follows the request |
| 0.33.0 | `Scheduler.update_from_output` caches the blocks of asynchronous steps, which `AsyncScheduler` did before | `cache_blocks` of `scheduler/block_manager.py` leaves calls out, whoever calls it |
| 0.33.0 | a model may store its keys itself, where the backend allows that, and call attention without | `worker/gpu_backends.py` does not allow it: the position probe must see the keys |
| 0.33.0 | a paused engine answers requests before the scheduler sees them | a call that names a message of which the scheduler has not heard fails at once (`CallTable.open`) |
| 0.33.0 | the runner V2 is warmed up on CPU, too | steps that come from no scheduler carry no `ChoreoStep`, and are vLLM's alone (`worker/model_runner.py`) |
| 0.33.0 | the last chunk of a stream carries `kv_transfer_params` | `server/openai/engine_client.py` takes ours out of the last output |
| 0.33.0 | `make_arg_parser` lives in `entrypoints.common.cli_args` | used in tests only (`tests/vllm_names.py`) |
"""  # noqa: E501

from __future__ import annotations

from vllm_choreo.errors import UnsupportedVersionError

# Each has a row in docs/install.md, which says what was run with it.
SUPPORTED_VLLM = ("0.32.0", "0.33.0")


def check_version() -> None:
    """Check that the installed vLLM is a supported version.

    Raises:
        UnsupportedVersionError: the installed vLLM is another version.
    """
    import vllm

    # A build may add a local part: 0.32.0+cpu.
    if vllm.__version__.split("+")[0] not in SUPPORTED_VLLM:
        raise UnsupportedVersionError(
            f"vllm-choreo works with vLLM {' and '.join(SUPPORTED_VLLM)}: install one of them, or "
            'leave "choreo" out of VLLM_PLUGINS (VLLM_PLUGINS="" loads no plugin)',
            parameter="vllm.__version__",
            value=vllm.__version__,
        )
