"""The objects of vLLM's runtime that our kernels use, with rows that tell where they are from."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from worker_client.integrations.vllm.kernels import GroupKernels

BLOCK_SIZE = 16
NUM_PAGES = 12
TOP_K = 24
HOT_ROWS = 64
ROW_BYTES = 656
NUM_REQUESTS = 5
NUM_HOST_BLOCKS = 64
NUM_DEVICE_BLOCKS = 40


def rows_of(layer: int, num_blocks: int) -> torch.Tensor:
    """uint8 [blocks, block_size, row_bytes]: distinct rows of a host layer."""
    generator = torch.Generator().manual_seed(layer)
    shape = (num_blocks, BLOCK_SIZE, ROW_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


class FakeGroup:
    """An index group of `num_layers`; request i has the state row 4 - i."""

    def __init__(self, device: torch.device, *, num_layers: int) -> None:
        self.device = device
        pin = device.type == "cuda"
        self.host = [rows_of(i, NUM_HOST_BLOCKS) for i in range(num_layers)]
        if pin:
            self.host = [rows.pin_memory() for rows in self.host]
        block_bytes = num_layers * BLOCK_SIZE * ROW_BYTES
        backing = torch.zeros(NUM_DEVICE_BLOCKS * block_bytes, dtype=torch.uint8, device=device)
        self.caches = [
            backing.as_strided(
                (NUM_DEVICE_BLOCKS, BLOCK_SIZE, ROW_BYTES), (block_bytes, ROW_BYTES, 1),
                i * BLOCK_SIZE * ROW_BYTES,
            )
            for i in range(num_layers)
        ]  # fmt: skip
        self.views = [backing[i * BLOCK_SIZE * ROW_BYTES :] for i in range(num_layers)]
        order = torch.arange(1, 1 + NUM_REQUESTS * NUM_PAGES, dtype=torch.int32)
        self.source = order.view(NUM_REQUESTS, NUM_PAGES).to(device)
        self.resident = torch.zeros((NUM_REQUESTS, NUM_PAGES), dtype=torch.int32, device=device)
        hot_blocks = HOT_ROWS // BLOCK_SIZE
        hot = torch.arange(10, 10 + NUM_REQUESTS * hot_blocks, dtype=torch.int32)
        self.hot = hot.view(NUM_REQUESTS, hot_blocks).to(device)
        self.states = torch.arange(NUM_REQUESTS - 1, -1, -1, dtype=torch.int32, device=device)
        shared = SimpleNamespace(
            physical_topk_indices=torch.full((8, TOP_K), -7, dtype=torch.int32, device=device),
            valid_topk_counts=torch.zeros(8, dtype=torch.int32, device=device),
        )
        self.group = SimpleNamespace(
            shared_topk=shared, followers=[],
            swap_stats=torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64),
            stats_row_bytes=num_layers * ROW_BYTES,
            copy_stream=torch.cuda.current_stream() if pin else None,
        )  # fmt: skip
        self.runtimes = [self._runtime(i) for i in range(num_layers)]
        self.group.leader, self.group.followers = self.runtimes[0], self.runtimes[1:]
        self._keep_last_page_resident()

    def _runtime(self, layer: int) -> SimpleNamespace:
        stride = self.caches[layer].stride(0) // ROW_BYTES
        return SimpleNamespace(
            index_group=self.group, device=self.device, max_num_reqs=NUM_REQUESTS,
            region_stride=HOT_ROWS, max_union_rows=TOP_K, max_swap_rows=8,
            host_cache=self.host[layer].view(-1, ROW_BYTES), request_state_indices=self.states,
            hot_block_table=self.hot,
            hot=SimpleNamespace(cache=self.caches[layer], attention_block_stride=stride),
        )  # fmt: skip

    def _keep_last_page_resident(self) -> None:
        """Device blocks 1 to 5: page 11 of each request, which the host has otherwise."""
        for request in range(NUM_REQUESTS):
            state = NUM_REQUESTS - 1 - request
            self.resident[state, NUM_PAGES - 1] = 1 + request
            for layer, cache in enumerate(self.caches):
                cache[1 + request] = (rows_of(layer + 100, NUM_DEVICE_BLOCKS)[1 + request]).to(
                    self.device
                )

    def kernels(self, backend: object) -> GroupKernels:
        handle = SimpleNamespace(
            block_table=self.resident, view=SimpleNamespace(block_size=BLOCK_SIZE)
        )
        return GroupKernels(self.group, {id(self.runtimes[0]): handle}, backend)

    def step(self, topk: torch.Tensor, requests: torch.Tensor, *, followers: bool = True) -> None:
        """One resolve and the copies of all layers, as vLLM's runtime orders them."""
        self.runtimes[0]._resolve_residency(
            req_id_per_token=requests, block_table=self.source, topk_indices=topk,
            block_size=BLOCK_SIZE, return_valid_counts=True, shared_rows=slice(0, len(topk)),
        )  # fmt: skip
        for runtime in self.runtimes if followers else self.runtimes[:1]:
            runtime._swap_rows(slice(0, len(topk)))

    def check(self, topk: torch.Tensor, requests: torch.Tensor) -> None:
        """Every selected row is its token's, in every layer."""
        shared = self.group.shared_topk
        for token, request in enumerate(requests.tolist()):
            lanes = topk[token].tolist()
            wanted = sum(p >= 0 for p in lanes) if request >= 0 else 0
            assert int(shared.valid_topk_counts[token]) == wanted
            for lane, position in enumerate(lanes):
                at = int(shared.physical_topk_indices[token, lane])
                if request < 0 or position < 0:
                    assert at == -1
                    continue
                page, offset = divmod(position, BLOCK_SIZE)
                for layer, view in enumerate(self.views):
                    found = view[at * ROW_BYTES : (at + 1) * ROW_BYTES].cpu()
                    if page == NUM_PAGES - 1:
                        expected = rows_of(layer + 100, NUM_DEVICE_BLOCKS)[1 + request, offset]
                    else:
                        block = int(self.source[request, page])
                        expected = self.host[layer][block, offset]
                    assert torch.equal(found, expected), (token, lane, position, layer)


def make_step(seed: int, device: torch.device, *, padding: int = 1) -> tuple:
    """(topk int32 [tokens, top_k], request of each token, -1 for padding at the end)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = NUM_REQUESTS + padding
    topk = torch.randint(
        0, NUM_PAGES * BLOCK_SIZE, (tokens, TOP_K), dtype=torch.int32, generator=generator
    )
    topk[torch.rand((tokens, TOP_K), generator=generator) < 0.1] = -1
    requests = torch.arange(tokens, dtype=torch.int32)
    requests[NUM_REQUESTS:] = -1
    return topk.to(device), requests.to(device)
