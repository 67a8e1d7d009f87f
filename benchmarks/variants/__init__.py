# SPDX-License-Identifier: Apache-2.0
"""One adapter's messages for another under load: what a partial prefill buys."""
