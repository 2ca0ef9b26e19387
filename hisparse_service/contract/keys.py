"""Block keys: 128 bit, chained over a namespace, an optional salt and the token ids.

    root  = H(fingerprint, salt)
    key_0 = H(root  | tokens of block 0)
    key_i = H(key_{i-1} | tokens of block i)       H = BLAKE2b, 16 B

So equal keys mean equal prefixes, and a key of one namespace means nothing in another. A client
hashes each token once and extends its chain as a request grows; token ids never travel. An engine
that has hashes of its own hands them to `KeyChain.extend_hashes`: each is bound to the root, so two
namespaces whose engines hash alike still have different keys.

Only whole blocks have keys. Pure: one chain is used by one thread at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.limits import (
    BLOCK_KEY_BYTES,
    FINGERPRINT_BYTES,
    KEY_SPACE_BYTES,
)

_PERSON_ROOT = b"hisparse-root-v1"
_PERSON_SPACE = b"hisparse-keyspc1"


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=BLOCK_KEY_BYTES).digest()


def key_space(fingerprint: bytes) -> bytes:
    """The 8 B tag that says which namespace keys were made for; travels with each keyed request."""
    return hashlib.blake2b(fingerprint, digest_size=KEY_SPACE_BYTES, person=_PERSON_SPACE).digest()


def root_key(fingerprint: bytes, *, salt: bytes = b"") -> bytes:
    """What the first block's key is chained to, 16 B.

    Raises:
        UsageError: The fingerprint is not FINGERPRINT_BYTES long.
    """
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise UsageError(
            f"a namespace fingerprint has {FINGERPRINT_BYTES} bytes, got {len(fingerprint)}"
        )
    # The fingerprint's length is fixed, so no two (fingerprint, salt) pairs hash the same bytes.
    return hashlib.blake2b(
        fingerprint + salt, digest_size=BLOCK_KEY_BYTES, person=_PERSON_ROOT
    ).digest()


class KeyChain:
    """The keys of one request's whole blocks, extended as its tokens arrive.

    Args:
        fingerprint: The namespace's, 16 B.
        block_size: Tokens a block.
        salt: Separates users of one namespace; empty for none.
    """

    def __init__(self, fingerprint: bytes, block_size: int, *, salt: bytes = b"") -> None:
        self._root = root_key(fingerprint, salt=salt)
        self._space = key_space(fingerprint)
        self._block_bytes = block_size * 4
        self._keys = bytearray()
        self._last = self._root
        self._tail = b""

    @property
    def key_space(self) -> bytes:
        """8 B tag of the namespace."""
        return self._space

    @property
    def num_blocks(self) -> int:
        """Whole blocks hashed so far."""
        return len(self._keys) // BLOCK_KEY_BYTES

    @property
    def num_tokens(self) -> int:
        """Tokens given so far, the unfinished block included."""
        return (len(self._keys) // BLOCK_KEY_BYTES * self._block_bytes + len(self._tail)) // 4

    def keys(self, start: int = 0, stop: int | None = None) -> bytes:
        """The keys of blocks [start, stop), 16 B each, as they travel."""
        stop = self.num_blocks if stop is None else stop
        return bytes(self._keys[start * BLOCK_KEY_BYTES : stop * BLOCK_KEY_BYTES])

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Add token ids (each 0 to 2**32 - 1) and hash the blocks that became whole.

        Returns:
            Blocks added.

        Raises:
            UsageError: Not one row of integers, or one out of range; nothing was added.
        """
        array = np.asarray(tokens)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            # Cast, 1.5 would be 1, and two prompts would share what is stored of one.
            raise UsageError(
                f"token ids are one row of integers, got {array.dtype} {array.shape}",
                remedy="Give the ids of one request, in order",
            )
        if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
            raise UsageError("token ids lie between 0 and 2**32 - 1")
        data = self._tail + array.astype("<u4").tobytes()
        whole = len(data) // self._block_bytes
        last, size = self._last, self._block_bytes
        for start in range(0, whole * size, size):
            last = _hash(last + data[start : start + size])
            self._keys += last
        self._last = last
        self._tail = data[whole * size :]
        return whole

    def extend_hashes(self, hashes: Iterable[bytes]) -> int:
        """Add blocks by the engine's own hashes (of any length), one a block, in order.

        The engine's hash must cover the whole prefix, as vLLM's and SGLang's do.

        Returns:
            Blocks added.

        Raises:
            UsageError: Tokens of an unfinished block were given before.
        """
        if self._tail:
            raise UsageError("a chain takes token ids or an engine's hashes, not both in one block")
        before = self.num_blocks
        for engine_hash in hashes:
            self._last = _hash(self._root + engine_hash)
            self._keys += self._last
        return self.num_blocks - before
