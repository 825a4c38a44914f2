"""Codecs of keys and values: one file each; `kv.codecs` has the interfaces and the names."""
