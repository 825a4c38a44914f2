"""Proposers of draft tokens that need no model; `scheduler.speculative` has the port and the names."""
