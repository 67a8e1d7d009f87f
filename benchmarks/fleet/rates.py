# SPDX-License-Identifier: Apache-2.0
"""Rates of an engine: Llama 3 70B in bfloat16 on four H100 SXM, from published figures.

| figure | value | source |
| --- | --- | --- |
| dense BF16 | 989 TFLOP/s | NVIDIA, H100 data sheet |
| memory | 80 GB | the same |
| network | 400 Gb/s for each GPU | NVIDIA, DGX H100 data sheet |
| answers of Llama 2 70B, 8 GPUs | 84.2 samples/s of 294 tokens | MLPerf Inference v4.1, offline |
| layers, heads of keys, head size | 80, 8, 128 | Meta, model card of Llama 3 70B |

Half of the peaks of arithmetic and network is assumed to be reached.
"""

from __future__ import annotations

from vllm_choreo.fleet.placement import Rates

_GPUS = 4
_REACHED = 0.5
_PARAMETERS = 70e9
_FLOPS = 989e12
_NETWORK_BYTES = 400e9 / 8
_KV_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
_MOVE_START = 2e-3  # seconds: a round trip and the first bytes

# Seconds a token.
ENCODE = 2 * _PARAMETERS / (_GPUS * _FLOPS * _REACHED)
MOVE = _KV_BYTES_PER_TOKEN / (_GPUS * _NETWORK_BYTES * _REACHED)
GENERATE = 8 / _GPUS / (84.2 * 294)
# Tokens: what the weights leave of nine tenths of the memory.
CAPACITY = int((0.9 * _GPUS * 80e9 - 2 * _PARAMETERS) / _KV_BYTES_PER_TOKEN)

RATES = Rates(encode=ENCODE, move=MOVE, move_start=_MOVE_START)
