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

_U32: Final = struct.Struct("<I")
_FIELDS: Final = struct.Struct("<QQQQQIIIIHB")
"""key_low, key_high, last_use, checksum, check, generation, parent, parent_generation, depth,
namespace, flags: all but the state, which follows"""

_AFTER_STATE: Final[dict[int, str]] = {
    int(state): declare(f"record.after_state_{state.name.lower()}") for state in BlockState
}
_PUBLISHED: Final = int(BlockState.PUBLISHED)
_AFTER_PUBLISHED: Final = _AFTER_STATE[BlockState.PUBLISHED]
_AFTER_GENERATION: Final = declare("record.after_generation")
_AFTER_LAST_USE: Final = declare("record.after_last_use")
_AFTER_FIELDS: Final = declare("record.after_fields_of_one")
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


_STATE_OFFSET: Final = _offset("state")
_GENERATION_OFFSET: Final = _offset("generation")
assert _offset("key_low") == 0
assert RECORD_DTYPE.names is not None
assert RECORD_DTYPE.names[4:] == (
    "check", "generation", "parent", "parent_generation", "depth", "namespace", "flags", "state",
)  # fmt: skip
assert _FIELDS.size == _STATE_OFFSET
_READ: Final = int(Readers.SOME)


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

    def store_state_one(self, block: int, state: int) -> None:
        """State of one block."""
        self._bytes[block * RECORD_BYTES + _STATE_OFFSET] = state
        crash_point(_AFTER_STATE[state])

    def store_state(self, blocks: Blocks, state: int) -> None:
        """State of blocks."""
        self._columns["state"][blocks] = state
        crash_point(_AFTER_STATE[state])

    def store_generation(self, blocks: Blocks, generations: npt.NDArray[np.uint32]) -> None:
        """Generations of blocks, u32 [n]."""
        self._columns["generation"][blocks] = generations
        crash_point(_AFTER_GENERATION)

    def store_generation_one(self, block: int, generation: int) -> None:
        """Generation of one block."""
        _U32.pack_into(self._bytes, block * RECORD_BYTES + _GENERATION_OFFSET, generation)
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

    def publish_one(
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
        """Everything of one block, whose state says until the last store that it holds nothing.

        A block is published with one reader, its writer. Where in the fields a crash falls makes no
        difference: nobody looks at them in that state.
        """
        namespace = self._namespace
        check = record_check(
            block=block, key_low=key_low, key_high=key_high, checksum=checksum,
            generation=generation, parent=parent, parent_generation=parent_generation,
            depth=depth, namespace=namespace, flags=0,
        )  # fmt: skip
        at = block * RECORD_BYTES
        _FIELDS.pack_into(
            self._bytes, at, key_low, key_high, last_use * 2 + _READ, checksum, check,
            generation, parent, parent_generation, depth, namespace, 0,
        )  # fmt: skip
        crash_point(_AFTER_FIELDS)
        self._bytes[at + _STATE_OFFSET] = _PUBLISHED
        crash_point(_AFTER_PUBLISHED)

    def fits(self, block: int, check: int) -> bool:
        """Whether the record of a published block is what was stored.

        Nothing that stands in it is used: it is only compared.

        Args:
            block: Its id.
            check: `record_check` of what the directory knows of it.
        """
        record = self.table[block : block + 1]
        found = record_checks(self.table, np.array([block], np.intp))
        return int(found[0]) == int(record["check"][0]) == check

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
