"""Batches: many requests from files, whose answers go to a file, in an order in which shared prefixes meet."""
