"""The copying kernels against the reference: every byte of both sides, written or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda.bindings import driver
from gpu_cases import make_pages

from benchmarks.gpu.workloads import l2_aside
from hisparse_service.contract.errors import UsageError
from worker_client.kernels.cuda import CopyLaunch, CudaBackend, CudaTuning
from worker_client.kernels.interface import GroupPages, allocate_plan
from worker_client.kernels.sorting import MIN_FREE_CONTROLS

DEVICE = torch.device("cuda:0")

LAYOUTS = [
    pytest.param(layers, row_bytes, block_size, interleaved, flat, id=name)
    for layers, row_bytes, block_size, interleaved, flat, name in (
        (1, 656, 64, False, True, "one-layer"),
        (4, 656, 64, True, True, "interleaved"),
        (4, 656, 64, False, True, "layer-major"),
        (4, 656, 64, True, False, "interleaved-odd-stride"),
        (3, 1_152, 16, True, True, "bf16"),
        (2, 1_152, 256, False, True, "bf16-layer-major"),
        (5, 16, 48, True, True, "one-lane"),
        (1, 10_000, 17, False, False, "wide-row"),
        (2, 65_536, 16, True, True, "widest-row"),
        (40, 656, 16, True, True, "two-launches"),
    )
]


def pair(layers: int, row_bytes: int, block_size: int, interleaved: bool, flat: bool):
    blocks = max(8, min(120, 2**23 // (layers * row_bytes * block_size)))
    made = [
        make_pages(
            layers=layers,
            row_bytes=row_bytes,
            block_size=block_size,
            host_blocks=blocks,
            device_blocks=blocks - 3,
            interleaved=interleaved,
            flat=flat,
            device=device,
            seed=11,
            pinned=pinned,
        )
        for device, pinned in ((DEVICE, True), ("cpu", False))
    ]
    return made[0], made[1], blocks


def assert_same_pages(got: GroupPages, expected: GroupPages) -> None:
    torch.cuda.synchronize()
    for side in ("host", "device"):
        for index, (left, right) in enumerate(
            zip(getattr(got, side), getattr(expected, side), strict=True)
        ):
            # Whole storages: what lies between the pages must be untouched too.
            a = left.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=left.device).set_(a).cpu()
            b = torch.empty(0, dtype=torch.uint8).set_(right.untyped_storage())
            assert torch.equal(whole[: b.numel()], b), f"{side} layer {index}"


def random_plan(pages: GroupPages, *, lists: int, longest: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    plan = allocate_plan(
        max_num_requests=lists,
        max_query_rows=lists,
        max_rows_per_request=1,
        top_k=longest,
        device="cpu",
    )
    host_rows = pages.host[0].shape[0] * pages.block_size
    device_blocks, block_size = pages.device[0].shape[0], pages.block_size
    targets = torch.randperm(device_blocks * block_size, generator=random)
    targets = targets // block_size * pages.block_stride_rows + targets % block_size
    plan.miss_source_rows.random_(0, host_rows, generator=random)
    plan.miss_counts.random_(0, longest + 1, generator=random)
    taken = 0
    for index in range(lists):
        count = min(int(plan.miss_counts[index]), targets.numel() - taken)
        plan.miss_counts[index] = count
        plan.miss_device_rows[index, :count] = targets[taken : taken + count]
        plan.miss_source_rows[index, count:] = 2**62  # must not be read
        taken += count
    return plan


def on_gpu(plan):
    from gpu_cases import to_device

    return to_device(plan, DEVICE)


@pytest.mark.parametrize(("layers", "row_bytes", "block_size", "interleaved", "flat"), LAYOUTS)
@pytest.mark.parametrize("min_rows", [0, 1_000_000], ids=["by-address", "in-order"])
def test_gather_copies_planned_rows_and_nothing_else(
    reference, layers, row_bytes, block_size, interleaved, flat, min_rows
) -> None:
    made = CudaBackend(DEVICE, tuning=CudaTuning(sort_min_rows=min_rows, sort_max_row_bytes=2**30))
    pages, expected, _ = pair(layers, row_bytes, block_size, interleaved, flat)
    plan = random_plan(expected, lists=5, longest=200, seed=12)
    reference.gather(pages=expected, plan=plan)
    made.gather(pages=pages, plan=on_gpu(plan))
    assert_same_pages(pages, expected)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "layer-major"])
@pytest.mark.parametrize("part", [(0, 1), (0, 3), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("min_rows", [0, 1_000_000], ids=["by-address", "in-order"])
def test_gather_of_some_layers_leaves_the_others_alone(
    reference, interleaved: bool, part: tuple[int, int], min_rows: int
) -> None:
    made = CudaBackend(DEVICE, tuning=CudaTuning(sort_min_rows=min_rows))
    pages, expected, _ = pair(4, 656, 64, interleaved, True)
    plan = random_plan(expected, lists=5, longest=200, seed=19)
    reference.gather(pages=expected.layers(*part), plan=plan)
    made.gather(pages=pages.layers(*part), plan=on_gpu(plan))
    assert_same_pages(pages, expected)


@pytest.mark.parametrize("threads", [256, 512])
@pytest.mark.parametrize("lists", [1, 64, 1_100])
def test_gather_with_many_requests_and_ranges(reference, threads: int, lists: int) -> None:
    tuning = CudaTuning(sorted=CopyLaunch(threads=threads, unroll=4, blocks=20), sort_min_rows=100)
    made = CudaBackend(DEVICE, tuning=tuning)
    pages, expected, _ = pair(1, 656, 64, False, True)
    plan = random_plan(expected, lists=lists, longest=4_096 if lists == 1 else 30, seed=13)
    reference.gather(pages=expected, plan=plan)
    made.gather(pages=pages, plan=on_gpu(plan))
    assert_same_pages(pages, expected)


@pytest.mark.parametrize("lists", [1, 7, 8, 9, 20, 32])
def test_gather_of_a_few_rows_by_fewer_warps_than_there_are_requests(reference, lists: int) -> None:
    one = CopyLaunch(threads=256, unroll=4, blocks=1)
    made = CudaBackend(DEVICE, tuning=CudaTuning(wide=one, small_batch_lists=0))
    pages, expected, _ = pair(4, 656, 64, True, True)
    plan = random_plan(expected, lists=lists, longest=1, seed=21)
    plan.miss_counts.fill_(1)
    plan.miss_source_rows.random_(64, 128)
    plan.miss_device_rows[:, 0] = torch.arange(lists)
    plan.miss_source_rows[0, 0] = -1  # padding in front hides nothing behind it
    reference_plan = replace(plan, miss_counts=plan.miss_counts.clone())
    reference_plan.miss_counts[0] = 0
    reference.gather(pages=expected, plan=reference_plan)
    made.gather(pages=pages, plan=on_gpu(plan))
    assert_same_pages(pages, expected)


def test_padding_among_a_few_rows_hides_nothing_behind_it(reference) -> None:
    # 16 warps, 16 rows, 8 warps a request: those of the first go on behind its padding.
    one = CopyLaunch(threads=512, unroll=4, blocks=1)
    made = CudaBackend(DEVICE, tuning=CudaTuning(wide=one, small_batch_lists=0))
    pages, expected, _ = pair(4, 656, 64, True, True)
    plan = random_plan(expected, lists=2, longest=12, seed=22)
    plan.miss_device_rows.copy_(torch.arange(24).view(2, 12))
    plan.miss_source_rows.random_(64, 128)
    plan.miss_counts.copy_(torch.tensor([12, 4]))
    on_device = on_gpu(plan)
    on_device.miss_source_rows[0, :4] = -1
    for column in range(4):
        plan.miss_source_rows[0, column] = plan.miss_source_rows[0, 4]
        plan.miss_device_rows[0, column] = plan.miss_device_rows[0, 4]
    reference.gather(pages=expected, plan=plan)
    made.gather(pages=pages, plan=on_device)
    assert_same_pages(pages, expected)


def small_rows(**tuning):
    shape = dict(layers=1, row_bytes=16, block_size=64, interleaved=False, flat=True, seed=14)
    pages = make_pages(host_blocks=400, device_blocks=400, device=DEVICE, pinned=True, **shape)
    expected = make_pages(host_blocks=400, device_blocks=400, device="cpu", pinned=False, **shape)
    made = CudaBackend(DEVICE, tuning=CudaTuning(sort_min_rows=0, **tuning))
    return made, pages, expected


@pytest.mark.parametrize("blocks", [1, 2, 16, 32])
def test_gather_by_address_with_any_number_of_thread_blocks(reference, blocks: int) -> None:
    made, pages, expected = small_rows(sorted=CopyLaunch(threads=256, unroll=4, blocks=blocks))
    plan = random_plan(expected, lists=6, longest=4_096, seed=15)
    assert int(plan.miss_counts.sum()) > 9_000
    reference.gather(pages=expected, plan=plan)
    made.gather(pages=pages, plan=on_gpu(plan))
    assert_same_pages(pages, expected)


@pytest.mark.parametrize("blocks", [1, 3, 12])
@pytest.mark.parametrize("wanted", [1, 5, 700])
def test_gather_shares_out_rows_that_crowd_in_a_few_places(
    reference, blocks: int, wanted: int
) -> None:
    # Most entries fall into one bin of addresses, or two: one block has them, the others help it.
    made, pages, expected = small_rows(sorted=CopyLaunch(threads=512, unroll=4, blocks=blocks))
    plan = random_plan(expected, lists=6, longest=4_096, seed=16)
    crowd = torch.rand(plan.miss_source_rows.shape) < 0.9
    plan.miss_source_rows[crowd & (plan.miss_source_rows < 2**40)] %= wanted
    plan.miss_source_rows[2] += 20_000 * (plan.miss_source_rows[2] < wanted)
    reference.gather(pages=expected, plan=plan)
    made.gather(pages=pages, plan=on_gpu(plan))
    assert_same_pages(pages, expected)


def test_gathers_by_address_on_several_streams_and_in_a_graph_keep_apart(reference) -> None:
    made, pages, expected = small_rows(sorted=CopyLaunch(threads=512, unroll=4, blocks=5))
    made.prepare()
    # Each of four has a quarter of the device rows, in its own launches.
    plan = random_plan(expected, lists=4, longest=4_096, seed=17)
    plans = [
        replace(
            plan,
            miss_source_rows=plan.miss_source_rows[i : i + 1],
            miss_device_rows=plan.miss_device_rows[i : i + 1],
            miss_counts=plan.miss_counts[i : i + 1],
        )
        for i in range(4)
    ]
    on_device = [on_gpu(part) for part in plans]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in on_device[2:]:
            made.gather(pages=pages, plan=part)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(50):
        torch.cuda._sleep(100_000)
        start = torch.cuda.current_stream().record_event()
        for stream, part in zip(streams, on_device[:2], strict=False):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                made.gather(pages=pages, plan=part)
        streams[2].wait_event(start)
        with torch.cuda.stream(streams[2]):
            graph.replay()
        torch.cuda.synchronize()
    reference.gather(pages=expected, plan=plan)
    assert_same_pages(pages, expected)


def test_gather_without_memory_to_sort_copies_in_the_order_of_the_plan(
    reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, pages, expected = small_rows()
    made.prepare()
    plan = random_plan(expected, lists=6, longest=4_096, seed=18)
    on_device = on_gpu(plan)
    before = [layer.clone() for layer in pages.device]
    for free in (1, 0):
        monkeypatch.setattr(made._sorting, "_free", made._sorting._free[:free])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                made.gather(pages=pages, plan=on_device)
        assert not made._sorting._free
        for layer, bytes_before in zip(pages.device, before, strict=True):
            layer.copy_(bytes_before)
        graph.replay()
        reference.gather(pages=expected, plan=plan)
        assert_same_pages(pages, expected)
    assert [record.message.count("order of the plan") for record in caplog.records] == [1]
    made.gather(pages=pages, plan=on_device)
    assert len(made._sorting._free) >= MIN_FREE_CONTROLS, "a call outside of captures makes more"
    assert_same_pages(pages, expected)


def test_cache_is_set_aside_as_far_as_the_device_allows_and_never_less_than_before(
    reference,
) -> None:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE
    most = driver.cuDeviceGetAttribute(attribute, DEVICE.index)[1]
    if not most:
        pytest.skip("this device sets no cache aside")
    with l2_aside(0):
        found = []
        for wanted in (8 * 2**20, 2**40, 2**20):
            made, pages, expected = small_rows(l2_set_aside_bytes=wanted)
            plan = random_plan(expected, lists=6, longest=4_096, seed=20)
            reference.gather(pages=expected, plan=plan)
            made.prepare()
            made.gather(pages=pages, plan=on_gpu(plan))
            assert_same_pages(pages, expected)
            limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
            found.append(driver.cuCtxGetLimit(limit)[1])
    assert 8 * 2**20 <= found[0] < most
    assert found[1:] == [most, most]


@pytest.mark.parametrize(("layers", "row_bytes", "block_size", "interleaved", "flat"), LAYOUTS)
def test_blocks_and_rows_go_to_host_and_back(
    backend, reference, layers, row_bytes, block_size, interleaved, flat
) -> None:
    pages, expected, blocks = pair(layers, row_bytes, block_size, interleaved, flat)
    device = torch.randint(-1, blocks - 3, (6,), dtype=torch.int32)
    host = torch.randperm(blocks)[:6].to(torch.int32)  # one may be 0: padding
    host[1] = -1
    reference.mirror_blocks(pages=expected, device_blocks=device, host_blocks=host)
    backend.mirror_blocks(pages=pages, device_blocks=device.to(DEVICE), host_blocks=host.to(DEVICE))
    assert_same_pages(pages, expected)

    slots = torch.randint(-1, (blocks - 3) * block_size, (37,))
    to = torch.randperm(blocks * block_size)[:37]
    to[3] = -1
    for part in ((0, layers), (layers - 1, layers)):
        reference.mirror_rows(pages=expected.layers(*part), device_slots=slots, host_slots=to)
        backend.mirror_rows(
            pages=pages.layers(*part), device_slots=slots.to(DEVICE), host_slots=to.to(DEVICE)
        )
        assert_same_pages(pages, expected)

    back = torch.randperm(blocks - 3)[:5].to(torch.int32)
    source = torch.randint(-1, blocks, (5,), dtype=torch.int32)
    part = (0, layers) if layers < 3 else (1, 3)
    reference.restore_blocks(pages=expected.layers(*part), host_blocks=source, device_blocks=back)
    backend.restore_blocks(
        pages=pages.layers(*part), host_blocks=source.to(DEVICE), device_blocks=back.to(DEVICE)
    )
    assert_same_pages(pages, expected)


@pytest.mark.parametrize(("layers", "row_bytes", "block_size", "interleaved", "flat"), LAYOUTS)
@pytest.mark.parametrize("count", [1, 5_000])
def test_stage_leaves_padding_rows_as_they_are(
    backend, reference, layers, row_bytes, block_size, interleaved, flat, count
) -> None:
    pages, expected, blocks = pair(layers, row_bytes, block_size, interleaved, flat)
    count = min(count, 2**25 // (layers * row_bytes))
    slots = torch.randint(-1, blocks * block_size, (count,))
    part = (0, layers)
    out = torch.randint(0, 256, (layers, count + 3, row_bytes), dtype=torch.uint8)
    got = out.to(DEVICE)
    reference.stage(pages=expected.layers(*part), host_slots=slots, out=out)
    backend.stage(pages=pages.layers(*part), host_slots=slots.to(DEVICE), out=got)
    assert torch.equal(got.cpu(), out)


def test_host_rows_equal_device_rows_after_replays(backend) -> None:
    pages, _, blocks = pair(4, 656, 64, True, True)
    slots = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    to = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    new = torch.zeros((8, 656), dtype=torch.uint8, device=DEVICE)

    def step() -> None:
        for layer in pages.device:
            layer[slots // 64, slots % 64] = new
        backend.mirror_rows(pages=pages, device_slots=slots, host_slots=to)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    done = {}
    for _ in range(40):
        at = torch.randperm((blocks - 3) * 64)[:8]
        where = torch.randperm(blocks * 64)[:8]
        bytes_ = torch.randint(0, 256, (8, 656), dtype=torch.uint8)
        slots.copy_(at)
        to.copy_(where)
        new.copy_(bytes_)
        graph.replay()
        done.update({int(w): bytes_[i].clone() for i, w in enumerate(where)})
    torch.cuda.synchronize()
    for slot, expected in done.items():
        for layer in pages.host:
            assert torch.equal(layer[slot // 64, slot % 64], expected)


def test_pages_that_are_not_registered_are_refused(backend) -> None:
    pages = make_pages(
        layers=1, row_bytes=656, block_size=64, host_blocks=4, device_blocks=4, interleaved=False,
        flat=True, device=DEVICE, seed=1, pinned=False,
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(UsageError, match="not registered"):
        backend.mirror_blocks(pages=pages, device_blocks=one, host_blocks=one)
