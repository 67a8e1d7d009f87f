# SPDX-License-Identifier: Apache-2.0
"""Several engines: what lies where, and where a call runs. Knows neither vLLM nor a clock."""
