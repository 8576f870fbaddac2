"""What runs next to a device: engine, KV pool, radix cache, scheduler, the actor."""
