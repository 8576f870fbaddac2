"""`headwater bench`: measurements of the running code, both sides of a comparison in one call."""
