"""Proposers of draft tokens that need no model; `scheduler.speculative` has the interface and the names."""
