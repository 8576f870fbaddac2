"""Request bodies, a file an API."""
