"""What a check of `hisparse-service doctor` is, and what it says."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable

from hisparse_service.contract.errors import HiSparseError


class Verdict(enum.Enum):
    """How a check ended."""

    GOOD = "good"
    WARNING = "warning"
    """It works, but not as well, or not as safely, as it could."""
    BAD = "bad"
    """The daemon will not start, or a worker will not attach."""
    SKIPPED = "skipped"
    """There is nothing to check here."""
    FIXED = "fixed"
    """It was bad or a warning, and `--fix` repaired it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    fix: Callable[[], str] | None = None
    """Repairs it and says what it did; None: nothing safe is known."""

    @property
    def is_bad(self) -> bool:
        """Whether something will not work."""
        return self.verdict is Verdict.BAD

    def as_row(self) -> dict[str, str]:
        """For programs."""
        return {
            "check": self.check, "verdict": self.verdict.value, "found": self.found,
            "remedy": self.remedy, "can_fix": "yes" if self.fix is not None else "no",
        }  # fmt: skip


def good(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, verdict=Verdict.GOOD, found=found)


def skipped(check: str, found: str) -> Finding:
    """There is nothing to check."""
    return Finding(check=check, verdict=Verdict.SKIPPED, found=found)


def warning(check: str, found: str, remedy: str, fix: Callable[[], str] | None = None) -> Finding:
    """It works, but."""
    return Finding(check=check, verdict=Verdict.WARNING, found=found, remedy=remedy, fix=fix)


def bad(check: str, found: str, remedy: str, fix: Callable[[], str] | None = None) -> Finding:
    """It will not work."""
    return Finding(check=check, verdict=Verdict.BAD, found=found, remedy=remedy, fix=fix)


@dataclasses.dataclass(frozen=True)
class Check:
    """A named check; one that fails itself is a finding too."""

    name: str
    body: Callable[[], Finding | Iterable[Finding]]

    def run(self, *, fix: bool = False) -> list[Finding]:
        """Its findings, repaired where asked and possible."""
        try:
            result = self.body()
            found = [result] if isinstance(result, Finding) else list(result)
        except HiSparseError as error:
            found = [bad(self.name, error.message, error.remedy)]
        except Exception as error:  # a check that breaks must not hide the others
            found = [
                warning(self.name, f"the check itself failed: {error!r}", "Report this as a bug")
            ]
        return [
            _fixed(finding) if fix and finding.fix is not None else finding for finding in found
        ]


def _fixed(finding: Finding) -> Finding:
    assert finding.fix is not None
    try:
        done = finding.fix()
    except (OSError, HiSparseError) as error:
        return dataclasses.replace(
            finding, found=f"{finding.found}; repairing it failed: {error}", fix=None
        )
    return Finding(check=finding.check, verdict=Verdict.FIXED, found=f"{finding.found}: {done}")
