"""Operators with one contract and several implementations, chosen by platform."""
