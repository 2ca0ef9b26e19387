"""A model's rows without the model: each row tells its layer and the tokens before it.

Equal prefixes have equal rows and nothing else has, so that a row that is read from the wrong
place, or too early, is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

VOCABULARY = 1000


def prefix_digests(tokens: Sequence[int]) -> list[bytes]:
    """16 B for each prefix of the tokens, chained."""
    digests, last = [], b""
    for token in tokens:
        last = hashlib.blake2b(last + token.to_bytes(4, "little"), digest_size=16).digest()
        digests.append(last)
    return digests


def row_bytes(layer: str, digest: bytes, size: int) -> np.ndarray:
    """uint8 [size]: the row of a layer at the end of a prefix."""
    seed = hashlib.blake2b(layer.encode() + digest, digest_size=16).digest()
    return np.resize(np.frombuffer(seed, np.uint8), size)


def row(layer: str, digest: bytes, like: torch.Tensor) -> torch.Tensor:
    """The same as a row of a cache ``[..., width]``."""
    width = like.shape[-1]
    data = row_bytes(layer, digest, width * like.element_size())
    return torch.from_numpy(data.copy()).view(like.dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the bytes are equal: rows of any bytes are also numbers that equal nothing."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.view(torch.uint8))


def next_token(tokens: Sequence[int]) -> int:
    """What this model says after these tokens."""
    return (sum(tokens) * 31 + len(tokens) * 7) % VOCABULARY
