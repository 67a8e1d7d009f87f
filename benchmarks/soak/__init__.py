# SPDX-License-Identifier: Apache-2.0
"""Does a server stay right under load and abuse?"""
