# SPDX-License-Identifier: Apache-2.0
"""Prompts from schemas: time to first token against prefix caching, and what answers lose."""
