# SPDX-License-Identifier: Apache-2.0
"""Workflows as programs: one file each, for any `Facade`.

All of them take and return the same:

    c: a `Facade` (vllm_choreo.api.protocol): a `Choreography` in any mode, a `ChoreoClient`, or a
        `Replay`.
    sampling_params: `vllm.SamplingParams` of the calls, the model's defaults if omitted; a seed is
        varied from call to call, so that equal prompts are not all answered alike.
    on_step: called with each `Step` when its call is done.

    Returns: a `Transcript` of all calls; its `answers` are what the workflow came to.
"""
