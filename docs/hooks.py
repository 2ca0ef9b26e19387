"""mkdocs hook: pages that exist beside the fixed ones come into the navigation by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parent
_OPTIONAL = {"vLLM": "vllm.md", "Performance": "performance.md", "Reliability": "reliability.md"}


def on_config(config: Any) -> Any:
    """Add what is there: optional pages, the decisions, the runbooks."""
    present = [{title: name} for title, name in _OPTIONAL.items() if (_DOCS / name).exists()]
    at = next(i for i, entry in enumerate(config.nav) if "Reference" in entry)
    decisions = sorted(path.relative_to(_DOCS).as_posix() for path in _DOCS.glob("decisions/*.md"))
    runbooks = sorted(path.relative_to(_DOCS).as_posix() for path in _DOCS.glob("runbooks/H*.md"))
    config.nav[at:at] = present
    config.nav = [entry for entry in config.nav if "Runbooks" not in entry]
    config.nav.append({"Runbooks": ["runbooks/index.md", *runbooks]})
    if decisions:
        config.nav.append({"Decisions": decisions})
    return config
