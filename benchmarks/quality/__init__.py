# SPDX-License-Identifier: Apache-2.0
"""What does choreography cost in answers?"""
