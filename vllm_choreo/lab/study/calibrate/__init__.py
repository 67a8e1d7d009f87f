# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo calibrate`: what repair buys on one's own runs, and a policy that buys enough."""
