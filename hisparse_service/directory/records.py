"""Stores into a block table, one at a time and in the order that survives a crash.

The table lies in shared memory: after a SIGKILL of the daemon it holds exactly the stores that were
made. So each method here is one step after which the table must make sense to `adopt`; the caller
orders the steps (contract/segment.py: fields, then check, then state). The directory never reads a
record that it wrote: workers map the table too, and it trusts its own arrays alone (I8).

Only `blocks.py` calls it, on the control loop.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.crashpoints import crash_point, declare
from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.segment import (
    RECORD_BYTES,
    RECORD_DTYPE,
    BlockState,
    record_check,
    record_checks,
)
from hisparse_service.directory.index import Blocks, Keys

_BODY: Final = struct.Struct("<QQQQ")
"""key_low, key_high, last_use, checksum"""
_LINKS: Final = struct.Struct("<IIIIHB")
"""generation, parent, parent_generation, depth, namespace, flags"""
_U64: Final = struct.Struct("<Q")

_AFTER_STATE: Final = {
    state: declare(f"record.after_state_{state.name.lower()}") for state in BlockState
}
_AFTER_GENERATION: Final = declare("record.after_generation")
_AFTER_LAST_USE: Final = declare("record.after_last_use")
_AFTER_BODY: Final = declare("record.after_body")
_AFTER_LINKS: Final = declare("record.after_links")
_AFTER_FIELD: Final = declare("record.after_field_of_many")
_AFTER_CHECK: Final = declare("record.after_check")


class Readers(enum.IntEnum):
    """Whether a published block is read: the lowest bit of its record's last_use."""

    NONE = 0
    SOME = 1


def _offset(name: str) -> int:
    fields = RECORD_DTYPE.fields
    assert fields is not None
    return int(fields[name][1])


_LINKS_OFFSET: Final = _offset("generation")
_CHECK_OFFSET: Final = _offset("check")
_STATE_OFFSET: Final = _offset("state")
assert _offset("key_low") == 0
assert _LINKS_OFFSET + _LINKS.size == _STATE_OFFSET


class RecordTable:
    """The stores of one block table.

    Args:
        table: `RECORD_DTYPE` [num_blocks], contiguous, writable. Borrowed until `detach`.
        namespace: Stands in each published record.

    Raises:
        UsageError: Not such an array.
    """

    def __init__(self, table: npt.NDArray[Any], *, namespace: int) -> None:
        flags = table.flags
        if (
            table.dtype != RECORD_DTYPE
            or table.ndim != 1
            or len(table) < 2
            or not (flags.c_contiguous and flags.writeable)
        ):
            raise UsageError(
                "a block table is a writable, contiguous RECORD_DTYPE array of 2 records or more, "
                f"got {table.dtype.itemsize} B items, shape {table.shape}"
            )
        self.num_blocks = len(table)
        self._namespace = namespace
        self._table: npt.NDArray[Any] | None = table
        self._bytes = table.view(np.uint8).data
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: table[name] for name in RECORD_DTYPE.names or ()
        }

    @property
    def table(self) -> npt.NDArray[Any]:
        """The raw records, for `adopt`."""
        assert self._table is not None
        return self._table

    def detach(self) -> None:
        """Drop every view of the table, so that the mapping can be closed. Idempotent."""
        self._bytes.release()
        self._columns.clear()
        self._table = None

    def store_state_one(self, block: int, state: BlockState) -> None:
        """State of one block."""
        self._bytes[block * RECORD_BYTES + _STATE_OFFSET] = state
        crash_point(_AFTER_STATE[state])

    def store_state(self, blocks: Blocks, state: BlockState) -> None:
        """State of blocks."""
        self._columns["state"][blocks] = state
        crash_point(_AFTER_STATE[state])

    def store_generation(self, blocks: Blocks, generations: npt.NDArray[np.uint32]) -> None:
        """Generations of blocks, u32 [n]."""
        self._columns["generation"][blocks] = generations
        crash_point(_AFTER_GENERATION)

    def store_last_use(
        self,
        blocks: Blocks,
        last_use: int | npt.NDArray[np.uint64],
        readers: Readers | npt.NDArray[np.uint64],
    ) -> None:
        """Use counters. Outside the check: legal at any time, torn or not."""
        self._columns["last_use"][blocks] = last_use * 2 + readers
        crash_point(_AFTER_LAST_USE)

    def store_fields_one(
        self,
        block: int,
        *,
        key_low: int,
        key_high: int,
        last_use: int,
        checksum: int,
        generation: int,
        parent: int,
        parent_generation: int,
        depth: int,
    ) -> None:
        """Everything of one block but its state, which must say that it holds nothing.

        A block is published with one reader, its writer.
        """
        at = block * RECORD_BYTES
        _BODY.pack_into(self._bytes, at, key_low, key_high, last_use * 2 + Readers.SOME, checksum)
        crash_point(_AFTER_BODY)
        _LINKS.pack_into(
            self._bytes, at + _LINKS_OFFSET,
            generation, parent, parent_generation, depth, self._namespace, 0,
        )  # fmt: skip
        crash_point(_AFTER_LINKS)
        check = record_check(
            block=block, key_low=key_low, key_high=key_high, checksum=checksum,
            generation=generation, parent=parent, parent_generation=parent_generation,
            depth=depth, namespace=self._namespace, flags=0,
        )  # fmt: skip
        _U64.pack_into(self._bytes, at + _CHECK_OFFSET, check)
        crash_point(_AFTER_CHECK)

    def store_fields(
        self,
        blocks: Blocks,
        *,
        keys: Keys,
        last_use: int,
        checksums: npt.NDArray[np.uint64] | None,
        generations: npt.NDArray[np.uint32],
        parents: Blocks,
        parent_generations: npt.NDArray[np.uint32],
        depths: npt.NDArray[np.uint32],
    ) -> None:
        """Everything of many blocks but their state; arrays of one length."""
        values: dict[str, Any] = {
            "key_low": keys[:, 0],
            "key_high": keys[:, 1],
            "last_use": last_use * 2 + Readers.SOME,
            "checksum": 0 if checksums is None else checksums,
            "generation": generations,
            "parent": parents,
            "parent_generation": parent_generations,
            "depth": depths,
            "namespace": self._namespace,
            "flags": 0,
        }
        for name, value in values.items():
            self._columns[name][blocks] = value
            crash_point(_AFTER_FIELD)
        self._columns["check"][blocks] = record_checks(self.table, blocks)
        crash_point(_AFTER_CHECK)
