"""Policies that decide where in a text the states of recurrent layers are cached, see `kv.state_snapshots`."""
