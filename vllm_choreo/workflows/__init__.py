# SPDX-License-Identifier: Apache-2.0
"""Workflows as programs: one file each, for any object with the interface of `Choreography`."""
