"""Records registers and spills of every kernel for every architecture. Needs NVRTC, no GPU.

`python -m benchmarks.gpu.kernel_resources FILE`
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from worker_client.kernels import launches
from worker_client.kernels.compile import ARCHITECTURES, KernelCompiler


def main(path: Path) -> None:
    tuning = launches.CudaTuning()
    specs = [
        launches.resolve_spec(threads=1024),
        launches.resolve_spec(threads=512),
        launches.resolve_spec(
            threads=1024, wide_keys=True, global_hash=True, wide_rows=True, power_of_two=False
        ),
        launches.copy_spec(tuning.wide, sorts=False),
        launches.copy_spec(tuning.sorted, sorts=True),
        launches.copy_spec(tuning.wide_beside, sorts=False),
        launches.copy_spec(tuning.sorted_beside, sorts=True),
        launches.copy_spec(tuning.blocks, sorts=False, power_of_two=False),
        launches.state_spec(),
    ]
    compiler = KernelCompiler(None)
    rows = [
        {"kernel": name, "arch": arch, "defines": dict(spec.defines), **asdict(used)}
        for arch in ARCHITECTURES
        for spec in specs
        for name, used in compiler.compile(spec, arch=arch).resources.items()
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} kernels, most spilled bytes {max(r['spill_store_bytes'] for r in rows)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
