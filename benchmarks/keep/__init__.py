# SPDX-License-Identifier: Apache-2.0
"""Is it faster to load messages than to encode them, and by how much?"""
