"""The library in every worker: attach to the pool, bind views, mirror blocks. Imports torch lazily."""

from __future__ import annotations
