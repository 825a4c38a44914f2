"""KV selection methods: one file a paper; `kv.selection` has the interface and the names."""
