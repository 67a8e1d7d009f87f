# SPDX-License-Identifier: Apache-2.0
"""Workflows, and what is studied with them: recorded, judged, trained, drawn.

A wing: nothing else of the package imports it. Importing it loads neither torch nor vllm.
"""
