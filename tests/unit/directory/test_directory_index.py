"""The key index against a dict, and the pin sets of leases against a set."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_service.directory.columns import BlockColumns
from hisparse_service.directory.index import KeyIndex, as_keys
from hisparse_service.directory.leases import PinSet

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add_one", "remove"]), st.integers(1, 40)), max_size=30
)


class OneBucketIndex(KeyIndex):
    """All keys in one bucket: the worst that a client could do if it knew the seed."""

    def _buckets(self, low, _high):
        return np.zeros(len(low), np.int64)

    def _bucket(self, _low, _high):
        return 0


@pytest.mark.parametrize("index_type", [KeyIndex, OneBucketIndex])
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 2**128 - 1))
def test_the_index_finds_what_a_dict_finds(index_type, operations, seed):
    index, model = index_type(BlockColumns(201), seed=seed), {}
    rng = np.random.default_rng(seed)
    for operation, count in operations:
        free = np.setdiff1d(np.arange(1, 201), list(model.values()))
        if operation == "remove":
            going = rng.permutation(list(model.values()))[:count].astype(np.intp)
            index.remove(going)
            model = {key: block for key, block in model.items() if block not in going}
        else:
            blocks = rng.permutation(free)[: 1 if operation == "add_one" else count]
            keys = rng.bytes(16 * len(blocks))
            if operation == "add":
                index.add(blocks, as_keys(keys))
            for i, block in enumerate(blocks.tolist()):
                key = keys[16 * i : 16 * i + 16]
                if operation == "add_one":
                    low, high = as_keys(key)[0].tolist()
                    index.add_one(block, low, high)
                model[key] = block
    asked = [*model, *(os.urandom(16) for _ in range(20)), bytes(16)]
    found = index.find(as_keys(b"".join(asked))).tolist()
    assert found == [model.get(key, 0) for key in asked]
    for key in asked:
        assert index.find_one(*as_keys(key)[0].tolist()) == model.get(key, 0)
    assert sorted(index.all_blocks().tolist()) == sorted(model.values())


def test_keys_that_share_a_half_are_told_apart():
    index = KeyIndex(BlockColumns(5), seed=3)
    keys = np.array([[1, 1], [1, 2], [2, 1], [2, 2]], np.uint64)
    index.add(np.arange(1, 5), keys)
    assert index.find(keys).tolist() == [1, 2, 3, 4]
    assert index.find_one(2, 1) == 3


def test_pins_are_a_set_however_they_came_in():
    pins = PinSet()
    pins.add(np.array([5, 6, 7]))
    pins.add_one(9)
    pins.add(np.array([1, 2]))
    assert len(pins) == 6
    assert pins.missing(np.array([1, 3, 9, 4])).tolist() == [3, 4]
    pins.remove(np.array([6, 9]))
    assert 9 not in pins
    assert 5 in pins
    assert sorted(pins.drain().tolist()) == [1, 2, 5, 7]
    assert len(pins) == 0
    assert pins.drain().size == 0
