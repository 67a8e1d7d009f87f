# SPDX-License-Identifier: Apache-2.0
"""What happens as more tokens are shared, and as more calls share them?"""
