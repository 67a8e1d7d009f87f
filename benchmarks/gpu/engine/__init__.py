# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM engine on a GPU: the laws of choreography, and the time of workflows."""
