# SPDX-License-Identifier: Apache-2.0
"""Messages that outlive a process: the files that hold them, on the facade's side; no engine."""
