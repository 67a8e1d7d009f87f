# SPDX-License-Identifier: Apache-2.0
"""`make check-vllm VERSION=…`: does what we use of vLLM exist there, and behave alike?"""
