# SPDX-License-Identifier: Apache-2.0
"""The part that lives inside vLLM, and the only importer of vLLM's internals."""
