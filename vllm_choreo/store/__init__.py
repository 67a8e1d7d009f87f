# SPDX-License-Identifier: Apache-2.0
"""Messages, their encodings and where these lie; on the scheduler's side, no torch and no vLLM."""
