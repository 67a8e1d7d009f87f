# SPDX-License-Identifier: Apache-2.0
"""Workers, which answer calls: over a facade, on servers, as actors of Ray."""
