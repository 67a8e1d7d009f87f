# SPDX-License-Identifier: Apache-2.0
"""Transcripts as one HTML page that needs nothing else: `vllm_choreo.transcript.page.page_html`."""
