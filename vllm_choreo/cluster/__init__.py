# SPDX-License-Identifier: Apache-2.0
"""A cluster: vLLM's server and several engines as deployments of Ray Serve (docs/serve.md)."""
