"""The static decode step: run as it is, or captured once in a CUDA graph and replayed.

A captured step may not wait for the device, allocate outside the graph's own pool, copy from
pageable memory, or have shapes that depend on values. `StaticInputs` is filled before a replay;
all else that the step reads (block tables, hot maps, pages, weights) are tensors that stay where
they are. Kernels are compiled and addresses looked up in warm-up runs over padding, which change
nothing.

The worker's compute thread; nothing else may use the device from this thread during the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from hisparse_service.contract.errors import ConfigError
from worker_client.integrations.transformers_steps import DecodeMode, StaticInputs, Step

_WARM_UPS: Final = 2
"""The first run compiles and caches, the second sees that nothing is left to do."""


class StaticDecode:
    """Static decode steps of one model.

    Args:
        inputs: What changes between steps.
        run: Runs a step; returns its logits. Called for each step, or once to capture it.
        mode: STATIC or GRAPH.

    Attributes:
        replays: Steps that were replayed.

    Raises:
        ConfigError: GRAPH without a CUDA device.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        run: Callable[[Step], torch.Tensor],
        *,
        mode: DecodeMode,
        device: torch.device,
    ) -> None:
        if mode is DecodeMode.GRAPH and device.type != "cuda":
            raise ConfigError(
                f"a decode step cannot be captured on {device}: CUDA graphs need a CUDA device",
                remedy="Use DecodeMode.STATIC (--no-cuda-graphs)",
            )
        self.inputs = inputs
        self.replays = 0
        self._run = run
        self._mode = mode
        self._captured: tuple[torch.cuda.CUDAGraph, Step, torch.Tensor] | None = None

    def __call__(self) -> tuple[Step, torch.Tensor]:
        """Run the step for the inputs as they are.

        Returns:
            The step, with what was seen in it, and the logits: valid until the next call.
        """
        if self._mode is DecodeMode.STATIC:
            step = self.inputs.step()
            return step, self._run(step)
        if self._captured is None:
            raise ConfigError("the decode step is not captured", remedy="Call prepare first")
        graph, step, logits = self._captured
        graph.replay()
        self.replays += 1
        return step, logits

    def prepare(self) -> None:
        """Capture the step, the first time. The inputs are padding afterwards."""
        if self._mode is DecodeMode.STATIC or self._captured is not None:
            return
        self.inputs.clear()
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._run(self.inputs.step())
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads that keep the connection to the service alive may go on meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step = self.inputs.step()
            logits = self._run(step)
        self._captured = (graph, step, logits)


__all__ = ["StaticDecode"]
