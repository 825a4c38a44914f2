"""KV eviction methods: one file a paper; `kv.eviction` has the port and the names."""
