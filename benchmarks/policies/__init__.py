# SPDX-License-Identifier: Apache-2.0
"""How should a message be read at another position: turn queries, or move keys?"""
