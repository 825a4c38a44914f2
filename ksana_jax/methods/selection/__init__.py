"""KV selection methods: one file a paper; `kv.selection` has the port and the names."""
