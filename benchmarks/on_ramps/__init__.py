# SPDX-License-Identifier: Apache-2.0
"""Chats that name no messages: a retrieval bot, and agents over one history."""
