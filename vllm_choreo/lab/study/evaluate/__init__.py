# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo evaluate`: text, choreography and adapters on the same problems, judged."""
