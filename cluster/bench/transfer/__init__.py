"""`headwater bench transfer`: the KV channel between two processes, and pairs of workers beside single ones."""
