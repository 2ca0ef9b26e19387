"""Bridges to engines and model libraries."""
