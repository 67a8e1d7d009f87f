# SPDX-License-Identifier: Apache-2.0
"""Query plans of workflows over a batch: what is shared, read and run, where and in which order.

A planner is on the client's side: it calls facades, in process or over HTTP. See docs/planner.md.
"""

from vllm_choreo.planner import ops
from vllm_choreo.planner.answer_cache import AnswerCache
from vllm_choreo.planner.cost import CostModel
from vllm_choreo.planner.graph import CompiledGraph, Graph, build
from vllm_choreo.planner.naive import naive
from vllm_choreo.planner.ops import Msg
from vllm_choreo.planner.planner import BatchResult, Planner, ainvoke, invoke, profile
from vllm_choreo.planner.profile import Profile
from vllm_choreo.planner.retrying import Retry
from vllm_choreo.planner.values import Template
from vllm_choreo.planner.worker import FacadeWorker

__all__ = [
    "AnswerCache",
    "BatchResult",
    "CompiledGraph",
    "CostModel",
    "FacadeWorker",
    "Graph",
    "Msg",
    "Planner",
    "Profile",
    "Retry",
    "Template",
    "ainvoke",
    "build",
    "invoke",
    "naive",
    "ops",
    "profile",
]
