"""The KV cache: memory, block pool, radix tree, and the cache that ties them to sequences."""
