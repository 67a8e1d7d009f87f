# SPDX-License-Identifier: Apache-2.0
"""Is this checkout slower or faster than another one of the same repository?"""
