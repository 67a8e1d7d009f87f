# SPDX-License-Identifier: Apache-2.0
"""Commands that run, record and train workflows; those of studies are beside their subject."""
