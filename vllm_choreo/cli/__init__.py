# SPDX-License-Identifier: Apache-2.0
"""The commands of `vllm-choreo`, one file each; they use the facades as any program does."""
