# SPDX-License-Identifier: Apache-2.0
"""Choreography over HTTP: routes, sessions and tenants of `vllm serve MODEL --plugin choreo`."""
