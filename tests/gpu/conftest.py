"""Fixtures of the tests that need a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from worker_client.kernels.reference import ReferenceBackend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "tests/gpu" in str(item.path) or "tests\\gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def backend() -> object:
    from worker_client.kernels.cuda import CudaBackend

    made = CudaBackend("cuda:0")
    made.prepare()
    return made


@pytest.fixture(scope="session")
def reference() -> ReferenceBackend:
    return ReferenceBackend()


@pytest.fixture(autouse=True)
def no_pending_error() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
