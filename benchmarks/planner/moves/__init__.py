# SPDX-License-Identifier: Apache-2.0
"""What it costs to move an answer from one worker to another, beside encoding its text again."""
