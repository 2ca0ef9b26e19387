"""Block keys: equal prefixes, and only those, have equal keys."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_service.contract.errors import UsageError
from hisparse_service.contract.keys import KeyChain, key_space, root_key

F = bytes(range(16))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def keys_of(tokens, *, block_size=4, fingerprint=F, salt=b""):
    chain = KeyChain(fingerprint, block_size, salt=salt)
    chain.extend(tokens)
    data = chain.keys()
    return [data[i : i + 16] for i in range(0, len(data), 16)]


@given(tokens, st.lists(st.integers(0, 40)))
def test_a_chain_extended_in_pieces_is_the_chain_of_the_whole(tokens, cuts):
    chain = KeyChain(F, 4)
    bounds = sorted({min(cut, len(tokens)) for cut in cuts} | {0, len(tokens)})
    for start, stop in itertools.pairwise(bounds):
        chain.extend(tokens[start:stop])
    assert chain.keys() == b"".join(keys_of(tokens))
    assert chain.num_blocks == len(tokens) // 4
    assert chain.num_tokens == len(tokens)


@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_the_tokens_do(one, other):
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    pairs = list(zip(keys_of(one), keys_of(other), strict=False))
    for block, (a, b) in enumerate(pairs):
        assert (a == b) == ((block + 1) * 4 <= common)


def test_keys_differ_between_namespaces_salts_and_block_sizes():
    variants = [
        keys_of(range(64)),
        keys_of(range(64), fingerprint=bytes(16)),
        keys_of(range(64), salt=b"user-1"),
        keys_of(range(64), block_size=8),
    ]
    firsts = {keys[0] for keys in variants}
    assert len(firsts) == len(variants)
    assert key_space(F) != key_space(bytes(16))


def test_token_ids_of_any_integer_type_hash_alike():
    expected = keys_of(range(32))
    assert keys_of(np.arange(32, dtype=np.int64)) == expected
    assert keys_of(np.arange(32, dtype=np.uint16)) == expected
    assert keys_of(tuple(range(32))) == expected


@pytest.mark.parametrize("bad", [[-1], [2**32], [1, 2, 3, -5]])
def test_a_token_id_out_of_range_adds_nothing(bad):
    chain = KeyChain(F, 4)
    chain.extend([7] * 5)
    with pytest.raises(UsageError):
        chain.extend(bad)
    assert chain.num_tokens == 5


@pytest.mark.parametrize(
    "bad", [[1.5], np.array([1.0, 2.0]), ["a"], [None], [[1, 2], [3, 4]], [True], 7], ids=repr
)
def test_what_is_no_row_of_integers_is_refused_and_never_cast(bad):
    """1.5 cast to 1 would give one prompt's rows to another."""
    chain = KeyChain(F, 4)
    chain.extend([7] * 5)
    with pytest.raises(UsageError, match="row of integers"):
        chain.extend(bad)
    assert chain.num_tokens == 5
    assert chain.extend([]) == 0


def test_an_engines_own_hashes_are_bound_to_the_namespace():
    hashes = [bytes([i]) * 32 for i in range(5)]
    one, other = KeyChain(F, 64), KeyChain(bytes(16), 64)
    assert one.extend_hashes(hashes) == 5
    other.extend_hashes(hashes)
    assert one.num_blocks == 5
    assert one.keys(0, 1) != other.keys(0, 1)
    again = KeyChain(F, 64)
    again.extend_hashes(hashes[:2])
    again.extend_hashes(hashes[2:])
    assert again.keys() == one.keys()


def test_tokens_and_engine_hashes_do_not_mix_in_one_block():
    chain = KeyChain(F, 4)
    chain.extend([1, 2])
    with pytest.raises(UsageError, match="not both"):
        chain.extend_hashes([b"x"])


def test_a_fingerprint_of_another_length_is_refused():
    with pytest.raises(UsageError, match="16 bytes, got 5"):
        root_key(b"short")
