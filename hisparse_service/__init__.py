"""The daemon that owns a node's host KV-cache pool. Imports no torch."""

from __future__ import annotations

__version__ = "0.1.0"
