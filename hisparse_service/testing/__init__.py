"""Fakes and fault helpers that ship with the package and are tested themselves."""
