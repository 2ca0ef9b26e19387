"""Rows that tell what they are, so that a reader can prove that it got the right bytes.

A row of ROW_BYTES: key of its block (16 B), namespace, block, version (the block's generation), row
number, layer, writer, then a 16 B hash of all that. A row copied from elsewhere, torn, or left from
an earlier use of the block does not verify.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

ROW_BYTES = 64
_FIELDS = struct.Struct("<16sIIIIII8x")
assert _FIELDS.size == ROW_BYTES - 16


def make_row(
    key: bytes, *, namespace: int, block: int, version: int, row: int, layer: int, writer: int
) -> bytes:
    """The bytes of one row."""
    body = _FIELDS.pack(key, namespace, block, version, row, layer, writer)
    return body + hashlib.blake2b(body, digest_size=16).digest()


def fill_block(
    view: npt.NDArray[np.uint8],
    key: bytes,
    *,
    namespace: int,
    block: int,
    version: int,
    writer: int,
) -> None:
    """Write all rows of a block.

    Args:
        view: uint8 [num_layers, block_size, ROW_BYTES] of this block.
    """
    for layer in range(view.shape[0]):
        for row in range(view.shape[1]):
            data = make_row(
                key, namespace=namespace, block=block, version=version, row=row, layer=layer,
                writer=writer,
            )  # fmt: skip
            view[layer, row] = np.frombuffer(data, np.uint8)


def count_wrong_bytes(
    rows: npt.NDArray[np.uint8], key: bytes, *, namespace: int, block: int, version: int
) -> int:
    """Bytes of rows that are not what this block must hold; 0 when all is right.

    Args:
        rows: uint8 [num_layers, block_size, ROW_BYTES], copied out of the pool.
    """
    wrong = 0
    for layer in range(rows.shape[0]):
        for row in range(rows.shape[1]):
            data = rows[layer, row].tobytes()
            body, digest = data[:-16], data[-16:]
            fields = _FIELDS.unpack(body)
            expected = (key, namespace, block, version, row, layer)
            if fields[:6] != expected or hashlib.blake2b(body, digest_size=16).digest() != digest:
                wrong += ROW_BYTES
    return wrong
