"""UserError: what the command line reports as one clear line."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; the message is one line that says what."""
