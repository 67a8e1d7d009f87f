# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation; `python -m tools.site` builds it strictly."""
