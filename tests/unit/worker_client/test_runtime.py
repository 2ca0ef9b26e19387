"""An index group on one backing: what attention reads is what was written, wherever it lay."""

from __future__ import annotations

import pytest
import torch

from hisparse_service.contract import limits
from hisparse_service.contract.errors import GeometryError, UsageError
from worker_client.runtime import (
    HiSparseCacheHandle,
    HiSparseRuntime,
    ResolvedHiSparseConfig,
    create_index_group_handles,
    initialize_hisparse_runtime_buffers,
)

SIZE, WIDTH, LAYERS, TOP_K = 4, 8, 3, 4
NUM_REQS, PAGES, HOST_BLOCKS = 2, 8, 20
HOT_ROWS = 2 * TOP_K
HOT_BLOCKS = HOT_ROWS // SIZE
DEVICE_BLOCKS = 12
ROW_BYTES = WIDTH * 4
PAGE_BYTES = SIZE * ROW_BYTES
BLOCK_STRIDE = (LAYERS + 1) * PAGE_BYTES


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Server:
    """One bound index group. Host rows hold (layer, host block, row) so that a mix-up shows."""

    def __init__(self, *, config=None, num_layers=LAYERS):
        self.config = config or ResolvedHiSparseConfig.resolve(top_k=TOP_K)
        self.handles = create_index_group_handles(
            self.config,
            num_layers=num_layers,
            row_width=WIDTH,
            kv_dtype=torch.float32,
            device="cpu",
        )
        self.backing = torch.zeros(DEVICE_BLOCKS * BLOCK_STRIDE, dtype=torch.int8)
        self.pool = torch.zeros(num_layers * HOST_BLOCKS * PAGE_BYTES, dtype=torch.int8)
        self.resident = torch.zeros((NUM_REQS, PAGES), dtype=torch.int32)
        self.source = (1 + torch.arange(NUM_REQS * PAGES)).reshape(NUM_REQS, PAGES).int()
        self.hot = i32([[4, 1], [3, 2]])
        self.slot_mapping = torch.full((8,), -1, dtype=torch.int64)
        self.mirror_slots = torch.full((8,), -1, dtype=torch.int64)
        for layer, handle in enumerate(self.handles):
            self.bind(layer, handle)

    def source_view(self, layer):
        size = HOST_BLOCKS * PAGE_BYTES
        rows = self.pool[layer * size : (layer + 1) * size].view(torch.float32)
        return rows.view(HOST_BLOCKS, SIZE, WIDTH)

    def bind(self, layer, handle):
        sizes = {
            "byte_offset": layer * PAGE_BYTES,
            "block_stride": BLOCK_STRIDE,
            "num_blocks": DEVICE_BLOCKS,
            "block_size": SIZE,
        }
        handle.bind_cache(
            self.backing, **sizes, block_table=self.resident, slot_mapping=self.slot_mapping
        )
        handle.runtime.bind_hot_cache(self.backing, **sizes, block_table=self.hot)
        source = self.source_view(layer)
        for block in range(HOST_BLOCKS):
            for row in range(SIZE):
                source[block, row] = layer * 1000 + block * 10 + row
        handle.runtime.bind_source_cache(source, registered_host_pool=self.pool)
        handle.source_block_table = self.source
        handle.mirror_slot_mapping = self.mirror_slots

    def start(self):
        initialize_hisparse_runtime_buffers(self.handles, max_num_reqs=NUM_REQS)
        return self

    def swap_in(self, handle, positions, slots=(0,)):
        return handle.swap_in(
            i32(positions),
            request_slots=i32(slots),
            query_starts=torch.arange(len(slots) + 1, dtype=torch.int32),
        )

    def want(self, layer, slot, position):
        block = int(self.source[slot, position // SIZE])
        return float(layer * 1000 + block * 10 + position % SIZE)


def test_every_layer_reads_its_own_rows_from_the_leaders_plan():
    """One offset for all layers of a group decodes noise: each must read its own bytes."""
    server = Server().start()
    positions = [[0, 5, 31, 9], [2, 3, -1, 14]]
    for step in range(3):
        for layer, handle in enumerate(server.handles):
            physical = server.swap_in(handle, positions, slots=(0, 1))
            for slot, lanes in enumerate(positions):
                for lane, position in enumerate(lanes):
                    row = int(physical[slot, lane])
                    assert (row == -1) == (position == -1)
                    if position >= 0:
                        values = handle.runtime.hot.attention_cache[row]
                        assert (values == server.want(layer, slot, position)).all(), step
        positions = [[lanes[3], lanes[0], lanes[1] + 1, 20 + step] for lanes in positions]


def test_statistics_count_lanes_by_tier_and_bytes_of_all_layers():
    server = Server().start()
    server.resident[0, 0] = 7
    leader = server.handles[0]
    server.swap_in(leader, [[0, 1, 8, 9]])
    server.swap_in(leader, [[8, 9, 10, -1]])
    found = leader.runtime.statistics()
    assert (found.resident_lanes, found.hot_lanes, found.miss_lanes) == (2, 2, 3)
    assert (found.miss_rows, found.invalid_lanes, found.transactions) == (3, 0, 2)
    assert found.gathered_bytes == 3 * ROW_BYTES * LAYERS
    leader.runtime.invalidate(i32([int(server.source[0, 2])]))
    assert server.handles[1].runtime.statistics().invalidated_rows == 3


def test_a_follower_without_its_leaders_step_is_refused():
    """It would read the rows of the step before."""
    server = Server().start()
    leader, follower = server.handles[:2]
    with pytest.raises(UsageError, match="leader has not resolved"):
        server.swap_in(follower, [[0, 1, 2, 3]])
    server.swap_in(leader, [[0, 1, 2, 3]])
    server.swap_in(follower, [[0, 1, 2, 3]])
    with pytest.raises(UsageError, match=r"layer 1 .* step 2"):
        server.swap_in(follower, [[0, 1, 2, 3]])


def test_a_failed_step_leaves_followers_and_state_where_they_were():
    server = Server().start()
    leader, follower = server.handles[:2]
    server.source[0, 3] = 0
    with pytest.raises(UsageError, match="no host row"):
        server.swap_in(leader, [[12, 0, 1, 2]])
    with pytest.raises(UsageError, match="leader has not resolved"):
        server.swap_in(follower, [[12, 0, 1, 2]])
    assert leader.runtime.statistics().transactions == 0
    assert not server.backing.any()


def test_a_rewritten_host_block_is_read_again_only_after_invalidate():
    server = Server().start()
    handle = server.handles[0]
    server.swap_in(handle, [[0, 1, 2, 3]])
    block = int(server.source[0, 0])
    server.source_view(0)[block] = -5.0
    physical = server.swap_in(handle, [[0, 1, 2, 3]])[0]
    assert (handle.runtime.hot.read(physical) != -5.0).all()
    handle.runtime.invalidate(i32([block, 0]))
    physical = server.swap_in(handle, [[0, 1, 2, 3]])[0]
    assert (handle.runtime.hot.read(physical) == -5.0).all()


def test_reset_empties_one_request_or_all():
    server = Server().start()
    handle = server.handles[0]
    server.swap_in(handle, [[0, 1, 2, 3], [0, 1, 2, 3]], slots=(0, 1))
    handle.runtime.reset(i32([1, -1]))
    state = handle.runtime.index_group.state
    assert (state.host_rows[1] == -1).all()
    assert (state.host_rows[0] >= 0).any()
    handle.runtime.reset()
    assert (state.host_rows == -1).all()
    assert (state.clock == 0).all()


def test_written_rows_reach_host_memory_through_the_mirror_target():
    server = Server().start()
    handle = server.handles[2]
    server.slot_mapping[:3] = torch.tensor([6 * SIZE + 1, -1, 6 * SIZE + 2])
    server.mirror_slots[:3] = torch.tensor([9 * SIZE + 1, -1, 9 * SIZE + 2])
    view, slots = handle.write_target(3)
    view.write_slots(slots, torch.full((3, WIDTH), 77.0))
    pages, device_slots, host_slots = handle.mirror_target(3)
    handle.runtime.index_group.backend.mirror_rows(
        pages=pages, device_slots=device_slots, host_slots=host_slots
    )
    assert (server.source_view(2)[9, 1:3] == 77.0).all()
    assert (server.source_view(2)[9, 0] != 77.0).all()
    assert (server.source_view(1) != 77.0).all()
    with pytest.raises(UsageError, match="9 tokens, the slot mapping holds 8"):
        handle.write_target(9)


def test_i2_resident_rows_are_read_in_place_before_any_mirror():
    server = Server().start()
    server.resident[0, 7] = 8
    server.source[0, 7] = 0  # no host block yet
    handle = server.handles[1]
    handle.view.cache[8, 3] = 3.5
    server.swap_in(server.handles[0], [[31, -1, -1, -1]])
    physical = server.swap_in(handle, [[31, -1, -1, -1]])
    assert (handle.runtime.hot.read(physical[0, :1]) == 3.5).all()
    assert handle.runtime.statistics().miss_rows == 0


# --- configuration --------------------------------------------------------------------------------


def test_the_default_hot_region_has_one_top_k_of_slack():
    config = ResolvedHiSparseConfig.resolve(top_k=2048, max_decode_query_len=2)
    assert config.device_buffer_size == 3 * 2048
    assert config.max_union_rows == 2 * 2048
    assert config.blocks_per_request(64) == 96
    assert ResolvedHiSparseConfig.resolve(top_k=5, device_buffer_size=7).blocks_per_request(4) == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"top_k": 8, "max_decode_query_len": 2, "device_buffer_size": 15},
            r"= 16 rows: device_buffer_size=15, max_decode_query_len=2, top_k=8",
        ),
        (
            {"top_k": 8, "device_buffer_size": limits.MAX_HOT_ROWS + 1},
            r"passes 32768.*device_buffer_size=32769, max_decode_query_len=1, top_k=8",
        ),
        ({"top_k": 4096, "max_decode_query_len": 8}, r"device_buffer_size=36864"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 4, "max_decode_query_len": 9}, "9 query rows"),
    ],
)
def test_a_hot_region_that_cannot_work_is_refused_with_all_values(sizes, message):
    with pytest.raises(GeometryError, match=message):
        ResolvedHiSparseConfig.resolve(**sizes)


def test_rows_that_are_no_multiple_of_16_bytes_are_refused():
    config = ResolvedHiSparseConfig.resolve(top_k=TOP_K)
    with pytest.raises(GeometryError, match="20 bytes, expected a multiple of 16"):
        HiSparseRuntime(config, row_width=5, kv_dtype=torch.float32, device="cpu")


def test_followers_must_have_their_leaders_sizes_and_join_in_time():
    server = Server()
    leader = server.handles[0].runtime
    make = {"kv_dtype": torch.float32, "device": "cpu", "leader": leader}
    with pytest.raises(GeometryError, match="leader's sizes"):
        HiSparseRuntime(server.config, row_width=16, **make)
    with pytest.raises(UsageError, match="cannot lead"):
        HiSparseRuntime(
            server.config, row_width=WIDTH, **(make | {"leader": server.handles[1].runtime})
        )
    server.start()
    with pytest.raises(UsageError, match="no layer can join"):
        HiSparseRuntime(server.config, row_width=WIDTH, **make)
    assert leader.index_group.num_layers == LAYERS


def test_a_source_cache_that_does_not_fit_is_refused():
    server = Server()
    runtime = server.handles[0].runtime
    good = server.source_view(0)
    with pytest.raises(GeometryError, match="source cache: expected"):
        runtime.bind_source_cache(good.double(), registered_host_pool=server.pool)
    with pytest.raises(GeometryError, match="source cache: expected"):
        runtime.bind_source_cache(good[:, :, :4], registered_host_pool=server.pool)
    with pytest.raises(UsageError, match="not in the storage"):
        runtime.bind_source_cache(good.clone(), registered_host_pool=server.pool)
    with pytest.raises(UsageError, match="registered pool of"):
        runtime.bind_source_cache(good, registered_host_pool=server.pool[: PAGE_BYTES * 3])
    with pytest.raises(UsageError, match="host memory"):
        runtime.bind_source_cache(good.to("meta"), registered_host_pool=server.pool)
    assert runtime.source.data_ptr() == good.data_ptr()


def test_hot_tables_and_layouts_that_do_not_fit_are_refused():
    server = Server()
    handle = server.handles[0]
    sizes = {
        "byte_offset": 0,
        "block_stride": BLOCK_STRIDE,
        "num_blocks": DEVICE_BLOCKS,
        "block_size": SIZE,
    }
    with pytest.raises(GeometryError, match=r"1 blocks a request, device_buffer_size=8 needs 2"):
        handle.runtime.bind_hot_cache(server.backing, **sizes, block_table=i32([[1]]))
    with pytest.raises(GeometryError, match="dtype of hot block table"):
        handle.runtime.bind_hot_cache(server.backing, **sizes, block_table=server.hot.long())
    shifted = sizes | {"byte_offset": PAGE_BYTES}
    handle.runtime.bind_hot_cache(server.backing, **shifted, block_table=server.hot)
    server.start()
    with pytest.raises(GeometryError, match="resident and hot layouts must match"):
        server.swap_in(handle, [[0, 1, 2, 3]])


def test_use_before_binding_names_the_missing_call():
    config = ResolvedHiSparseConfig.resolve(top_k=TOP_K)
    runtime = HiSparseRuntime(config, row_width=WIDTH, kv_dtype=torch.float32, device="cpu")
    handle = HiSparseCacheHandle(runtime)
    assert runtime.resident_source_index == -1
    assert handle.view is None
    assert not handle.draft_layer
    for call, message in (
        (lambda: runtime.hot, "bind_hot_cache"),
        (lambda: runtime.source, "bind_source_cache"),
        (handle.tables, "bind_cache"),
        (lambda: handle.write_target(1), "bind_cache"),
        (lambda: runtime.reset(), "initialize_buffers"),
        (lambda: runtime.initialize_buffers(max_num_reqs=1), "bind_hot_cache"),
        (lambda: initialize_hisparse_runtime_buffers([], max_num_reqs=1), "no cache handles"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_buffers_are_made_once_a_group_and_bounded_by_the_batch():
    config = ResolvedHiSparseConfig.resolve(top_k=TOP_K, max_decode_query_len=2)
    server = Server(config=ResolvedHiSparseConfig.resolve(top_k=TOP_K))
    initialize_hisparse_runtime_buffers(
        server.handles, max_num_reqs=NUM_REQS, max_num_batched_tokens=1
    )
    group = server.handles[0].runtime.index_group
    assert group.plan.max_query_rows == 1
    assert group.plan.physical_rows.dtype == torch.int32
    with pytest.raises(UsageError, match="made for 2 requests, not 3"):
        server.handles[1].runtime.initialize_buffers(max_num_reqs=3)
    with pytest.raises(GeometryError, match="2 query rows"):
        server.swap_in(server.handles[0], [[0] * TOP_K] * 2, slots=(0, 1))
    assert config.max_union_rows == 2 * TOP_K
