"""BatchError: why a batch cannot begin or go on."""

from __future__ import annotations


class BatchError(Exception):
    """Something that whoever runs the batch can put right; the message is one line that says what."""
