# SPDX-License-Identifier: Apache-2.0
"""Number of threads of engines on CPUs that share a process.

vLLM keeps oneDNN's matrix products for the whole process, by the shape of the weights and the
number of rows, while oneDNN lays out the weights of some shapes by the number of threads, too. So
a product that one engine has made reads the weights of a later one wrongly, and answers are wrong,
if the two do not have the same number of threads.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.choreo.cpu_threads")
_of_first_engine: int | None = None


def keep_num_threads() -> None:
    """Give this thread the number of threads with which the first engine of the process started.

    To be called before an engine's weights are loaded, by the thread that runs its steps.
    """
    global _of_first_engine
    found = torch.get_num_threads()
    _of_first_engine = _of_first_engine or found
    if found != _of_first_engine:
        logger.warning(
            "This engine runs with %d threads and not %d, as the first engine of this process "
            "did: with another number vLLM would misread its weights. Start engines of other "
            "numbers of threads in processes of their own.",
            _of_first_engine,
            found,
        )
        # torch's own function: vLLM puts one that does nothing in place of the public one.
        torch._C.set_num_threads(_of_first_engine)
