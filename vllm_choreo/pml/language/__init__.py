# SPDX-License-Identifier: Apache-2.0
"""Language of schemas and prompts: from markup to the arguments of calls, without making any."""
