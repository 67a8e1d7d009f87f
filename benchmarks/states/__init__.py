# SPDX-License-Identifier: Apache-2.0
"""Models with states in place of keys: exact chains against vLLM's prefix caching."""
