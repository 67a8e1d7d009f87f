# SPDX-License-Identifier: Apache-2.0
"""Where a schedule pays: orders of the same calls in pools of KV cache of several sizes."""
