# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo judge`: which of two runs answers better, as a judge model says."""
