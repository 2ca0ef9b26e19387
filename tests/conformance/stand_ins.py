"""What a CPU has not: streams, events, pinned memory, CUDA registration and compiled operators.

Everything else that conformance runs is vLLM's own code. Streams run at once and in order, so that
an event is complete when it is recorded; `EVENTS.hold()` keeps events from completing, as copies
that are still under way would.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import torch


class Events:
    """Whether events that are recorded now count as complete."""

    def __init__(self) -> None:
        self.held = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        self.held = True
        try:
            yield
        finally:
            self.held = False


EVENTS = Events()


class Event:
    def __init__(self, *args, **kwargs) -> None:
        del args, kwargs

    def record(self, stream=None) -> None:
        del stream

    def query(self) -> bool:
        return not EVENTS.held

    def synchronize(self) -> None:
        pass

    def ipc_handle(self) -> bytes:
        return b"event"

    @classmethod
    def from_ipc_handle(cls, device, handle) -> Event:
        assert device is not None
        assert handle == b"event"
        return cls()


class Stream:
    def __init__(self, *args, **kwargs) -> None:
        del args, kwargs

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        pass

    def wait_event(self, event) -> None:
        del event

    def wait_stream(self, stream) -> None:
        del stream

    def record_event(self, event=None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass


_STREAM = Stream()


@contextlib.contextmanager
def _current(stream):
    yield stream


def swap_blocks_batch(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor) -> None:
    """The compiled batch copy: (address, address, bytes) each."""
    for a, b, n in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(b, a, n)


class CacheOps:
    """`torch.ops._C_cache_ops`: as vLLM's kernels are documented, in plain Python.

    Hot slots are chosen least recently used first, as the kernels do; which slot a row gets is the
    kernels' own business, and nothing here depends on it.
    """

    @staticmethod
    def hisparse_invalidate_written_slots(indices, state_indices, req_ids, slots) -> None:
        for token in range(slots.numel()):
            request = int(req_ids[token])
            if request < 0 or int(slots[token]) < 0:
                continue
            row = indices[int(state_indices[request])]
            row[row == int(slots[token])] = -1

    @staticmethod
    def hisparse_gather_compact(host, hot, host_rows, hot_rows, counts) -> None:
        # As `PagedCacheView.bind` numbers physical rows.
        rows, per_row = hot.shape[1], hot.stride(1)
        stride_rows = rows if hot.stride(0) % (rows * per_row) else hot.stride(0) // per_row
        for token in range(counts.numel()):
            for lane in range(int(counts[token])):
                slot = int(hot_rows[token, lane])
                hot[slot // stride_rows, slot % stride_rows] = host[int(host_rows[token, lane])]

    @staticmethod
    def hisparse_gather_plan(host, staged, row_ids, dst_rows, miss_mask, *_) -> None:
        flat = staged.view(-1, staged.shape[-1])
        for lane in range(row_ids.shape[1]):
            if int(miss_mask[0, lane]):
                flat[int(dst_rows[0, lane])] = host[int(row_ids[0, lane])]

    @staticmethod
    def hisparse_resolve_residency(
        host_cache, hot_cache, hot_table, topk, hot_rows_out, global_indices, lru, state_indices,
        region_stride, max_union_rows, _a, stats, physical_out, attention_stride, req_ids,
        block_table, block_size, _b, valid_counts, host_rows, device_rows, counts,
        resident_table, resident_block_size, _c,
    ) -> None:  # fmt: skip
        del host_cache, hot_cache, max_union_rows, resident_block_size, _a, _b, _c
        for token in range(topk.shape[0]):
            request = int(req_ids[token])
            physical_out[token].fill_(-1)
            hot_rows_out[token].fill_(-1)
            counts[token] = 0
            if valid_counts is not None:
                valid_counts[token] = 0
            if request < 0:
                continue
            state = int(state_indices[request])
            wanted = []
            for lane, position in enumerate(topk[token].tolist()):
                if position < 0:
                    continue
                if valid_counts is not None:
                    valid_counts[token] += 1
                page, row = divmod(position, block_size)
                resident = 0
                if resident_table is not None:
                    resident = int(resident_table[state, page])
                if resident:
                    physical_out[token, lane] = resident * attention_stride + row
                    continue
                wanted.append((lane, int(block_table[request, page]) * block_size + row))
            CacheOps._place(
                token, state, wanted, global_indices, lru, hot_table[request], region_stride,
                attention_stride, block_size, stats, physical_out, hot_rows_out, host_rows,
                device_rows, counts,
            )  # fmt: skip

    @staticmethod
    def _place(
        token, state, wanted, global_indices, lru, hot_table, region_stride, attention_stride,
        block_size, stats, physical_out, hot_rows_out, host_rows, device_rows, counts,
    ) -> None:  # fmt: skip
        held = {int(row): slot for slot, row in enumerate(global_indices[state].tolist())}
        order = lru[state].tolist()
        used = []
        needed = {row for _, row in wanted}
        for lane, host_row in wanted:
            slot = held.get(host_row)
            if slot is None:
                keep = {held[row] for row in needed if row in held}
                slot = next(s for s in order if s not in keep)
                old = int(global_indices[state, slot])
                held.pop(old, None)
                held[host_row] = slot
                global_indices[state, slot] = host_row
                at = int(counts[token])
                host_rows[token, at] = host_row
                device_rows[token, at] = (
                    int(hot_table[slot // block_size]) * attention_stride + slot % block_size
                )
                counts[token] = at + 1
                stats[1] = int(stats[1]) + 1  # no uint64 addition on a CPU
            else:
                stats[0] = int(stats[0]) + 1
            order.remove(slot)
            order.append(slot)
            used.append(slot)
            physical_out[token, lane] = (
                int(hot_table[slot // block_size]) * attention_stride + slot % block_size
            )
            hot_rows_out[token, lane] = slot
        assert len(order) == region_stride
        lru[state].copy_(torch.tensor(order, dtype=torch.int16))


def _without_pin(function):
    def call(*args, pin_memory=False, **kwargs):
        del pin_memory
        return function(*args, **kwargs)

    return call


def install() -> None:
    """Put the stand-ins in place, for this process, before vLLM's HiSparse modules are used."""
    from vllm import _custom_ops
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker
    from vllm.utils import torch_utils
    from vllm.v1.hisparse import runtime
    from vllm.v1.worker import utils as worker_utils

    torch.Stream, torch.Event = Stream, Event
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.stream = _current
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.accelerator.synchronize = lambda *_: None
    torch.empty = _without_pin(torch.empty)
    torch.tensor = _without_pin(torch.tensor)
    torch.Tensor.pin_memory = lambda self, *_: self
    for module in (runtime, worker, torch_utils):
        module.current_stream = lambda: _STREAM
    _custom_ops.swap_blocks_batch = swap_blocks_batch
    torch.ops._C_cache_ops = CacheOps
    runtime.pin_tensor = lambda _: None
    no_error = SimpleNamespace(value=0)
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostUnregister=lambda _: no_error, cudaGetLastError=lambda: no_error
    )
    runtime.async_tensor_h2d = lambda data, device, dtype: torch.as_tensor(
        data, dtype=dtype, device=device
    )
    del worker_utils
