# SPDX-License-Identifier: Apache-2.0
"""Choreography on vLLM's own routes /v1/completions and /v1/chat/completions, and in its batches.

A request is choreographed if its `vllm_xargs` have a key that begins with `choreo_`. Then vLLM
does all that it does for any other request, from the chat template to tool calls and streams, on an
engine client (`CallClient`) that runs the prompt as the header of a decode. Only the numbers of the
answer are ours. Other requests take vLLM's way alone.
"""
