# SPDX-License-Identifier: Apache-2.0
"""How fast is the attention operation alone: against vLLM's, and where calls read together?"""
