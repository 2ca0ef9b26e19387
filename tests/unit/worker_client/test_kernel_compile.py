"""The kernels compile for every architecture without a GPU; the cache gives the right code back."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")

from hisparse_service.contract.errors import InternalError
from worker_client.kernels import launches
from worker_client.kernels.compile import (
    ARCHITECTURES,
    SOURCE_DIRECTORY,
    KernelCompiler,
    KernelSpec,
    parse_resources,
)
from worker_client.kernels.tables import plan_tables

TUNING = launches.CudaTuning()
SPECS = {
    "resolve-1024": launches.resolve_spec(threads=1024),
    "resolve-512": launches.resolve_spec(threads=512),
    "resolve-widest": launches.resolve_spec(
        threads=1024, wide_keys=True, global_hash=True, wide_rows=True, power_of_two=False
    ),
    "copy-wide": launches.copy_spec(TUNING.wide, sorts=False),
    "copy-sorted": launches.copy_spec(TUNING.sorted, sorts=True),
    "copy-wide-beside": launches.copy_spec(TUNING.wide_beside, sorts=False),
    "copy-sorted-beside": launches.copy_spec(TUNING.sorted_beside, sorts=True),
    "copy-blocks": launches.copy_spec(TUNING.blocks, sorts=False, power_of_two=False),
    "state": launches.state_spec(),
}
ENTRIES = {
    "resolve.cu": {"hs_resolve"},
    "copy.cu": {
        "hs_rows_to_device",
        "hs_rows_to_host",
        "hs_blocks_to_device",
        "hs_blocks_to_host",
    },
    "state.cu": {"hs_invalidate", "hs_reset"},
}
REGISTER_FILE = 65_536
MAX_SPILL_BYTES = 64
"""Bytes a thread: a few registers around a call that is rarely made."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_kernel_compiles_and_its_registers_are_recorded(
    spec: KernelSpec, arch: str, record_property: pytest.FixtureRequest
) -> None:
    compiled = KernelCompiler(None).compile(spec, arch=arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert set(compiled.resources) == ENTRIES[spec.source]
    threads = dict(spec.defines)["HS_THREADS"]
    blocks = dict(spec.defines).get("HS_BLOCKS_PER_SM", 1)
    for name, used in compiled.resources.items():
        record_property(f"{name}.{arch}", repr(used))
        assert used.registers * threads * blocks <= REGISTER_FILE, (name, used)
        assert used.spill_store_bytes <= MAX_SPILL_BYTES, (name, used)


@pytest.mark.parametrize(
    ("source", "struct", "mirror"),
    [
        ("resolve.cu", "ResolveArgs", launches.ResolveArgs),
        ("copy.cu", "RowArgs", launches.RowArgs),
        ("copy.cu", "BlockArgs", launches.BlockArgs),
        ("state.cu", "InvalidateArgs", launches.InvalidateArgs),
        ("state.cu", "ResetArgs", launches.ResetArgs),
    ],
)
def test_arguments_have_the_kernel_s_fields_in_its_order(
    source: str, struct: str, mirror: type[ctypes.Structure]
) -> None:
    text = (SOURCE_DIRECTORY / source).read_text()
    body = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    fields = re.findall(r"([\w* ]+?)\s*\b(\w+)(\[\w+\])?;", code)
    assert [name for _, name, _ in fields] == [field[0] for field in mirror._fields_]
    sizes = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}
    for (kind, name, array), field in zip(fields, mirror._fields_, strict=True):
        size = 8 if "*" in kind else sizes[kind.split()[-1]]
        count = launches.MAX_LAYERS_A_LAUNCH if array else 1
        assert ctypes.sizeof(field[1]) == size * count, name


def test_the_cache_gives_the_same_code_without_compiling(tmp_path: Path) -> None:
    compiler = KernelCompiler(tmp_path / "kernels", driver_version="13000")
    first = compiler.compile(SPECS["state"], arch="sm_90")
    again = compiler.compile(SPECS["state"], arch="sm_90")
    assert not first.from_cache
    assert again.from_cache
    assert again.cubin == first.cubin
    assert again.resources == first.resources


def test_a_damaged_cache_file_is_compiled_again(tmp_path: Path) -> None:
    compiler = KernelCompiler(tmp_path, driver_version="13000")
    first = compiler.compile(SPECS["state"], arch="sm_90")
    (kept,) = tmp_path.glob("*.cubin")
    kept.write_bytes(first.cubin[:-1] + b"\x01")
    second = compiler.compile(SPECS["state"], arch="sm_90")
    assert not second.from_cache
    assert second.cubin == first.cubin
    next(tmp_path.glob("*.json")).write_text("{")
    assert not compiler.compile(SPECS["state"], arch="sm_90").from_cache


def test_a_cache_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert KernelCompiler(shared).cache_directory is None
    shared.chmod(0o700)
    assert KernelCompiler(shared).cache_directory == shared


def test_the_key_changes_with_all_that_the_code_depends_on(tmp_path: Path) -> None:
    keys = [
        KernelCompiler(tmp_path, driver_version=driver).key(spec, arch=arch)
        for driver in ("12090", "13000")
        for spec in SPECS.values()
        for arch in ARCHITECTURES
    ]
    assert len(set(keys)) == len(keys)
    assert KernelCompiler(None).key(SPECS["state"], arch="sm_90") == KernelCompiler(None).key(
        SPECS["state"], arch="sm_90"
    )


def test_a_source_that_does_not_compile_carries_the_compiler_s_log() -> None:
    spec = KernelSpec.make("state.cu", {"HS_THREADS": 512})
    with pytest.raises(InternalError, match="HS_SIZEOF_INVALIDATE"):
        KernelCompiler(None).compile(spec, arch="sm_90")


def test_resources_are_read_from_the_assembler_s_report() -> None:
    log = (
        "ptxas info    : Compiling entry function 'hs_a' for 'sm_90'\n"
        "ptxas info    : Function properties for hs_a\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 1328 bytes smem, 624 bytes cmem[0]\n"
    )
    used = parse_resources(log)["hs_a"]
    assert (used.registers, used.spill_store_bytes, used.spill_load_bytes) == (64, 8, 12)
    assert (used.stack_bytes, used.static_shared_bytes) == (16, 1_328)


@pytest.mark.parametrize("budget_bytes", [96 * 1024, 160 * 1024, 226 * 1024])
@pytest.mark.parametrize("key_bytes", [4, 8])
@pytest.mark.parametrize("hot_rows", [1, 100, 4_096, 6_144, 8_192, 32_768])
def test_tables_fit_their_memory_and_the_rows_fit_the_table(
    budget_bytes: int, key_bytes: int, hot_rows: int
) -> None:
    for max_lanes in {1, hot_rows // 4 or 1, hot_rows}:
        for num_pages in (1, 1_024, 16_384):
            layout = plan_tables(
                max_lanes=max_lanes,
                hot_rows=hot_rows,
                cached_hot_blocks=min(hot_rows, 1_024),
                num_pages=num_pages,
                key_bytes=key_bytes,
                table_factor=4.0,
                budget_bytes=budget_bytes,
            )
            assert layout.shared_bytes <= budget_bytes
            assert layout.table_slots % 4 == 0
            assert layout.table_slots > max_lanes  # a search ends at an empty slot
            assert layout.table_slots <= 65_536  # entries of misses are 16-bit
            assert layout.cached_pages in (0, num_pages)


def test_a_one_row_step_keeps_its_tables_in_shared_memory_twice_a_multiprocessor() -> None:
    layout = plan_tables(
        max_lanes=2_048,
        hot_rows=4_096,
        cached_hot_blocks=64,
        num_pages=1_024,
        key_bytes=4,
        table_factor=4.0,
        budget_bytes=(228 * 1024) // 2 - 3 * 1024,
    )
    assert not layout.in_workspace
    assert layout.table_slots == 8_192
    assert layout.cached_pages == 1_024
