# SPDX-License-Identifier: Apache-2.0
"""What do choreographed calls cost the ordinary requests beside them: in batches, over HTTP?"""
