# SPDX-License-Identifier: Apache-2.0
"""Does a server stay right whatever two tenants send to any of its routes?"""
