# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: one folder per question, and a harness.

In a question's folder `__main__.py` measures and writes CSV files to `results/`, `page.py` makes
its part of RESULTS.md from them. Programs import from their folder and from `harness`, never from
one another nor from tests. `gpu/` runs without vLLM, on an engine of its own.
"""
