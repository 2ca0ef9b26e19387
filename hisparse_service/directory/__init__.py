"""Meaning: block states, the prefix index, leases and eviction. Pure."""
