# SPDX-License-Identifier: Apache-2.0
"""What do whole workflows gain over vLLM's prefix caching: to the first token, and end to end?"""
