"""Compiles the `.cu` files through NVRTC and keeps the machine code on disk.

A kernel is compiled for one architecture with its compile-time sizes as macros. The result is kept
under everything that it depends on: source, headers, entry, macros, options, architecture, compiler
and driver. A kept file that does not match its own checksum is compiled again, a directory that
cannot be used only costs the compilation. Nothing here needs a GPU.

Called by `cuda.py` when a backend is made or first needs a variant (never in a captured graph), and
by the tests that compile every kernel for every architecture. One thread at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hisparse_service.contract.errors import InternalError

SOURCE_DIRECTORY: Final = Path(__file__).resolve().parent
ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What every kernel must compile for."""

CACHE_FORMAT: Final = 1
MAX_CUBIN_BYTES: Final = 64 * 1024 * 1024

__all__ = [
    "ARCHITECTURES",
    "CompiledKernel",
    "KernelCompiler",
    "KernelResources",
    "KernelSpec",
    "default_cache_directory",
]


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What the assembler reports about one kernel (per thread, unless it says otherwise)."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    """Per thread block, dynamic shared memory not included."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One variant of one source file."""

    source: str
    """File name, for example ``copy.cu``."""
    defines: tuple[tuple[str, int], ...] = ()

    @classmethod
    def make(cls, source: str, defines: Mapping[str, int]) -> KernelSpec:
        """Make a spec whose macros do not depend on their order."""
        return cls(source, tuple(sorted(defines.items())))


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of one variant, all its entries, and what they use."""

    cubin: bytes
    resources: Mapping[str, KernelResources]
    """By entry name."""
    from_cache: bool


def default_cache_directory() -> Path:
    """``hisparse/kernels`` in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "hisparse" / "kernels"


class KernelCompiler:
    """Compiles variants, with a cache on disk."""

    def __init__(
        self, cache_directory: Path | None = None, *, driver_version: str = "none"
    ) -> None:
        """Make a compiler.

        Args:
            cache_directory: Where machine code is kept; None keeps nothing.
            driver_version: Version of the driver that will load it: part of the key.
        """
        self._cache_directory = _usable_directory(cache_directory)
        self._driver_version = driver_version

    @property
    def cache_directory(self) -> Path | None:
        """Where machine code is kept; None if nowhere."""
        return self._cache_directory

    def compile(self, spec: KernelSpec, *, arch: str) -> CompiledKernel:
        """Return the machine code of a variant, compiled or kept.

        Args:
            spec: What to compile.
            arch: For example ``sm_90``.

        Raises:
            InternalError: The source does not compile; carries the compiler's log.
        """
        key = self.key(spec, arch=arch)
        kept = self._load(key)
        if kept is not None:
            return kept
        cubin, log = _compile(spec, arch)
        resources = parse_resources(log)
        self._store(key, cubin, resources)
        return CompiledKernel(cubin, resources, from_cache=False)

    def key(self, spec: KernelSpec, *, arch: str) -> str:
        """Hex digest of all that the machine code depends on."""
        digest = hashlib.sha256()
        parts: list[str] = [
            str(CACHE_FORMAT),
            arch,
            _compiler_version(),
            self._driver_version,
            repr(_OPTIONS),
            repr(spec.defines),
            spec.source,
        ]
        for path in [SOURCE_DIRECTORY / spec.source, *sorted(SOURCE_DIRECTORY.glob("*.cuh"))]:
            parts += [path.name, path.read_text(encoding="utf-8")]
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()

    def _load(self, key: str) -> CompiledKernel | None:
        if self._cache_directory is None:
            return None
        try:
            record = json.loads((self._cache_directory / f"{key}.json").read_text("utf-8"))
            cubin = (self._cache_directory / f"{key}.cubin").read_bytes()
            if hashlib.sha256(cubin).hexdigest() != record["sha256"]:
                return None
            resources = {
                name: KernelResources(**values) for name, values in record["resources"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return CompiledKernel(cubin, resources, from_cache=True)

    def _store(self, key: str, cubin: bytes, resources: Mapping[str, KernelResources]) -> None:
        if self._cache_directory is None or len(cubin) > MAX_CUBIN_BYTES:
            return
        record = {
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "resources": {name: asdict(values) for name, values in resources.items()},
        }
        try:
            # The record goes last: a reader that finds it finds the code it describes.
            _replace(self._cache_directory / f"{key}.cubin", cubin)
            _replace(self._cache_directory / f"{key}.json", json.dumps(record).encode())
        except OSError:
            return


_OPTIONS: Final = {"std": "c++17", "lineinfo": True, "ptxas_options": ["-v"]}


def _usable_directory(directory: Path | None) -> Path | None:
    """The directory, made if need be; None where others could put code into it."""
    if directory is None:
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError:
        return None
    writable_by_others = stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid != os.geteuid() or writable_by_others:
        return None
    return directory


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error) != 0:
        raise InternalError(f"NVRTC does not tell its version: error {int(error)}")
    return f"nvrtc {major}.{minor}"


def _compile(spec: KernelSpec, arch: str) -> tuple[bytes, str]:
    from cuda.core import Program, ProgramOptions

    code = (SOURCE_DIRECTORY / spec.source).read_text(encoding="utf-8")
    options: Any = ProgramOptions(
        name=spec.source,
        arch=arch,
        include_path=str(SOURCE_DIRECTORY),
        define_macro=[(name, str(value)) for name, value in spec.defines],
        **_OPTIONS,
    )
    log = io.StringIO()
    try:
        program = Program(code, "c++", options)
        compiled = program.compile("cubin", logs=log)
    except Exception as error:  # cuda.core's error classes differ between its versions
        raise InternalError(
            f"{spec.source} does not compile for {arch} with {dict(spec.defines)}: {error}"
        ) from error
    return bytes(compiled.code), log.getvalue()


_ENTRY: Final = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> dict[str, KernelResources]:
    """Read the assembler's report (``ptxas -v``), one entry a kernel."""
    found: dict[str, KernelResources] = {}
    entry: str | None = None
    stack = stores = loads = 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry, stack, stores, loads = match[1], 0, 0, 0
        elif match := _SPILLS.search(line):
            # A function that is not inlined reports its own frame: the largest counts.
            stack = max(stack, int(match[1]))
            stores += int(match[2])
            loads += int(match[3])
        elif (match := _REGISTERS.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            found[entry] = KernelResources(
                registers=int(match[1]),
                spill_store_bytes=stores,
                spill_load_bytes=loads,
                stack_bytes=stack,
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
            entry = None
    return found
