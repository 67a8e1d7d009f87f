# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo tables`: the tables of the paper Prompt Choreography, in kind, on any model.

Beside them one of agents that program, as KVCOMM has them.
"""
