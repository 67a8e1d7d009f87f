# SPDX-License-Identifier: Apache-2.0
"""Query plans of workflows over a batch: what is shared, read and run, where and in which order.

A planner is on the client's side: it calls facades, in process or over HTTP. See docs/planner.md.
"""

from vllm_choreo.planner.execute.answer_cache import AnswerCache
from vllm_choreo.planner.execute.naive import naive
from vllm_choreo.planner.execute.retry import Retry
from vllm_choreo.planner.logical import ops
from vllm_choreo.planner.logical.graph import CompiledGraph, Graph, build
from vllm_choreo.planner.logical.ops import Msg
from vllm_choreo.planner.logical.values import Template
from vllm_choreo.planner.physical.cost import CostModel, EngineModel
from vllm_choreo.planner.physical.profile import Profile
from vllm_choreo.planner.planner import BatchResult, Planner, ainvoke, invoke, profile
from vllm_choreo.planner.workers.facade import FacadeWorker

__all__ = [
    "AnswerCache",
    "BatchResult",
    "CompiledGraph",
    "CostModel",
    "EngineModel",
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
