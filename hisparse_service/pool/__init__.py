"""Bytes: reserve, populate, adopt, release and register the pool's shared memory."""
