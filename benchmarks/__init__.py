# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one folder per question, and a harness.

In a question's folder `__main__.py` measures and writes CSV files and pictures to `results/`,
`tables.py` declares the tables that are made from them, `bars.py` says whether the numbers are good
enough. The sentences of RESULTS.md are written by hand. Programs import from their folder and from
`harness`, never from one another nor from tests. `gpu/` runs without vLLM, on an engine of its own.
"""
