"""KV eviction methods: one file a paper; `kv.eviction` has the interface and the names."""
