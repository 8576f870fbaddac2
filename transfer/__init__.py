"""What crosses between nodes: messages, prefix keys, KV layout, KV channel."""
