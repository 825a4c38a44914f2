"""Codecs of keys and values: one file each; `kv.codecs` has the ports and the names."""
