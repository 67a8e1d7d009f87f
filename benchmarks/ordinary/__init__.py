# SPDX-License-Identifier: Apache-2.0
"""What does the plugin cost requests that do not use it?"""
