# SPDX-License-Identifier: Apache-2.0
"""Where does the time to first token go, choreographed and as text? A parallel debate."""
