"""GPU tests under compute-sanitizer: `python -m benchmarks.gpu.sanitize --out LOG`.

Each tool runs a part of tests/gpu that shows each kernel at least once; `--all` runs all of it.
initcheck is not among them: torch's own kernels read memory that they never wrote, on purpose, and
with those left out all that torch has filled counts as never written.
The log has one line a tool (tests passed, errors found, seconds) and below it what a tool said. The
exit code counts the tools that found something or ran no test.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
TESTS = "tests/gpu"
SAMPLE = (
    r"gather_copies_planned.*(-one-layer|-interleaved|-two-launches)\]",
    r"gather_with_many_requests",
    r"any_number_of_thread_blocks",
    r"crowd_in_a_few_places",
    r"on_several_streams",
    r"without_memory_to_sort",
    r"blocks_and_rows.*\[(one-layer|interleaved)\]",
    r"stage_leaves.*(-one-layer|-interleaved)\]",
    r"agrees_with_the_reference.*\[(default|block_size=48|top_k=256-rows=4|block_size=16-top_k=100)",
    r"512_threads",
    r"invalid_lanes",
    r"past_the_end",
    r"test_invalidate",
    r"reset_empties",
)
"""Tests that show each kernel and its variants, as patterns of their names."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool."""

    name: str
    options: tuple[str, ...] = ()


TOOLS = (
    # Bindings newer than the driver ask for entry points that it lacks: that is no finding.
    Tool(name="memcheck", options=("--report-api-errors", "no")),
    Tool(name="racecheck"),
    Tool(name="synccheck"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one tool found."""

    tool: str
    code: int
    seconds: float
    tests: str
    """pytest's last line."""
    summary: str
    """The tool's last line."""
    details: str

    @property
    def is_clean(self) -> bool:
        """Whether tests ran and nothing was found."""
        numbers = re.findall(r"(\d+) (?:errors?|hazards)", self.summary)
        return (
            self.code == 0
            and "passed" in self.tests
            and bool(numbers)
            and not any(map(int, numbers))
        )

    def line(self) -> str:
        """For the log."""
        verdict = "clean" if self.is_clean else f"NOT CLEAN (exit {self.code})"
        return f"{self.tool:10s} {verdict}: {self.tests}; {self.summary} ({self.seconds:.0f} s)"


def find_sanitizer(given: str | None) -> str | None:
    """Path of compute-sanitizer, if there is one."""
    found = given or shutil.which("compute-sanitizer")
    if found:
        return found
    candidates = [Path(place) / "compute-sanitizer" for place in PLACES]
    return next((str(path) for path in candidates if path.is_file()), None)


def sample(pytest_options: list[str]) -> list[str]:
    """Node ids of the sample."""
    command = [sys.executable, "-m", "pytest", TESTS, "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *pytest_options],
        capture_output=True,
        text=True,
        check=False,
    )
    nodes = [line for line in done.stdout.splitlines() if "::" in line]
    for pattern in unmatched(nodes):
        print(f"no test of {TESTS} is called {pattern}", flush=True)
    return [node for node in nodes if any(re.search(pattern, node) for pattern in SAMPLE)]


def unmatched(nodes: list[str]) -> list[str]:
    """Patterns of the sample that name no test any more."""
    return [pattern for pattern in SAMPLE if not any(re.search(pattern, node) for node in nodes)]


def command_of(sanitizer: str, tool: Tool, log: Path, tests: list[str]) -> list[str]:
    """The tool around pytest."""
    return [
        sanitizer, "--tool", tool.name, "--log-file", str(log), "--error-exitcode", "9",
        "--print-limit", "20", *tool.options, sys.executable, "-m", "pytest", "-q",
        "-p", "no:cacheprovider", "-o", "timeout=0", "-o", "faulthandler_timeout=0", *tests,
    ]  # fmt: skip


def check(sanitizer: str, tool: Tool, tests: list[str], limit_s: float) -> Outcome:
    """Run one tool over these tests."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sanitize-") as directory:
        log, said_at = Path(directory) / "tool.log", Path(directory) / "tests.log"
        with said_at.open("w") as out:
            try:
                code = subprocess.run(
                    command_of(sanitizer, tool, log, tests), stdout=out,
                    stderr=subprocess.STDOUT, timeout=limit_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = 124
        said = said_at.read_text(errors="replace").strip().splitlines()
        found = log.read_text(errors="replace") if log.exists() else ""
    summaries = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", found)
    return Outcome(
        tool=tool.name,
        code=code,
        seconds=time.monotonic() - began,
        tests=said[-1].strip("= ") if said else "no test ran",
        summary=summaries[-1] if summaries else "no summary",
        details="\n".join([*found.splitlines()[:80], *said[-30:]]),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", default="memcheck,racecheck,synccheck")
    parser.add_argument("--sanitizer")
    parser.add_argument("--limit-s", type=float, default=150.0, help="of each tool")
    parser.add_argument("--all", action="store_true", help="all tests of tests/gpu")
    parser.add_argument("--pytest", default="", help="more options for pytest, as one word")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    sanitizer = find_sanitizer(options.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer: not found; give --sanitizer PATH")
        return len(TOOLS)
    more = shlex.split(options.pytest)
    tests = [*more, *([TESTS] if options.all else sample(more))]
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines, details, unclean = [f"{date}, commit {options.commit}, {TESTS}"], [], 0
    for tool in TOOLS:
        if tool.name not in options.tools.split(","):
            continue
        outcome = check(sanitizer, tool, tests, options.limit_s)
        unclean += not outcome.is_clean
        lines.append(outcome.line())
        print(outcome.line(), flush=True)
        if not outcome.is_clean:
            details.append(f"\n--- {tool.name}\n{outcome.details}")
        options.out.write_text("\n".join(lines + details) + "\n")
    return unclean


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
