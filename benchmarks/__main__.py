"""All benchmarks that need no GPU, one after another: `python -m benchmarks [--quick]`."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "benchmarks.control",
    "benchmarks.bench_directory",
    "benchmarks.bench_populate",
    "benchmarks.bench_reference_gather",
)


def main() -> int:
    """Run each module with this run's arguments; the exit code of the worst."""
    codes = [
        subprocess.run([sys.executable, "-m", module, *sys.argv[1:]], check=False).returncode
        for module in MODULES
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
