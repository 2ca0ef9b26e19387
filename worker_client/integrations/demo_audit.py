"""The demonstration's witnesses: which rows were computed, and which were chosen.

Rows, byte for byte: ranks must read from the host what rank 0 computed.

Rank 0 notes every row as it leaves the model, before any tier has seen it, and writes a page's rows
into a file when the page is sent to its host block. Any rank that reads a row from the host pool
compares it with that file. So a wrong offset, a copy that came too late or a stale row shows, even
where it would not change a token.

One ledger file a demonstration, indexed by host block; written by rank 0 alone, before the block is
published, and read only for published blocks.

Choices: the top-k of each token. The reference makes its own. Where the two differ because two
scores are equal but for rounding, both are right, and no test of tokens can tell them apart from an
error; so the reference checks with its own scores that it is such a tie, counts it, and then goes
on with the choice that was made here. Any other difference is a wrong choice. In bfloat16 the noise
of the scores is as great as their distances, so that there are no ties to speak of: there the
reference counts the rows that both chose, and always goes on with the choice that was made here.

Used on the worker's compute thread.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from hisparse_service.contract.geometry import HostGeometry
from hisparse_service.contract.segment import BlockState
from worker_client.host_pool import HostPool

_DIGEST_BYTES = 16


def page_digest(tokens: Sequence[int], end: int) -> bytes:
    """A name for the rows of a page: they depend on all tokens up to its ``end``."""
    return hashlib.blake2b(
        np.asarray(tokens[:end], np.int64).tobytes(), digest_size=_DIGEST_BYTES
    ).digest()


class RowLedger:
    """A `MirrorAudit` over a shared file.

    Args:
        path: The file; made if it is not there.
        geometry: Of the host blocks.
        num_blocks: Host blocks, the null block included.
        choices: Where the choices go; None where this rank notes nothing (all but rank 0).

    Attributes:
        tokens_of: The tokens of a request, to be set before the first page is mirrored.
        checked_rows: Rows that were read from the host and compared, each layer's counted.
        wrong_rows: Those that differed.
        first_wrong: Where the first of them was, for people.
        wrong_blocks: Host blocks with wrong bytes.
    """

    def __init__(
        self, path: Path, geometry: HostGeometry, num_blocks: int, *, choices: Choices | None
    ) -> None:
        self.checked_rows = 0
        self.wrong_rows = 0
        self.first_wrong = ""
        self.wrong_blocks: set[int] = set()
        self._geometry = geometry
        self._choices = choices
        self._rows: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        self.tokens_of: Callable[[str], Sequence[int]] = lambda _: ()
        self._digests, self._pages = _map_pages(path, geometry, num_blocks)

    def page(self, layer: int, host_block: int) -> npt.NDArray[np.uint8]:
        """Rows of a layer in a host block, uint8 [block_size, row_bytes], as rank 0 computed them.

        The indexer keys of the i-th leader are layer ``num_layers + i``.
        """
        rows: npt.NDArray[np.uint8] = self._pages[layer][host_block]
        return rows

    def digest(self, host_block: int) -> bytes:
        """`page_digest` of the page that was mirrored to a host block last; zeros for none."""
        return bytes(self._digests[host_block])

    def computed(
        self, layer: int, request_id: str, positions: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Note rows of a request (rank 0)."""
        if self._choices is None:
            return
        raw = rows.detach().contiguous().view(torch.uint8).cpu().numpy()
        end = int(positions[-1]) + 1
        held = self._rows.get((request_id, layer))
        if held is None or len(held) < end:
            grown = np.zeros((max(2 * end, 256), raw.shape[-1]), np.uint8)
            if held is not None:
                grown[: len(held)] = held
            self._rows[request_id, layer] = held = grown
        held[positions.cpu().numpy()] = raw

    def selected(
        self, group: int, request_id: str, positions: torch.Tensor, top_k: torch.Tensor
    ) -> None:
        """Note what was chosen (rank 0)."""
        if self._choices is not None:
            chosen = top_k.cpu().numpy()
            self._choices.of(request_id)[group, positions.cpu().numpy(), : chosen.shape[1]] = chosen

    def mirrored(self, request_id: str, page: int, host_block: int) -> None:
        """Write a page's rows to the ledger (rank 0)."""
        if self._choices is None:
            return
        size = self._geometry.block_size
        digest = page_digest(self.tokens_of(request_id), (page + 1) * size)
        self._digests[host_block] = np.frombuffer(digest, np.uint8)
        for layer, pages in enumerate(self._pages):
            rows = self._rows[request_id, layer]
            pages[host_block] = rows[page * size : (page + 1) * size]

    def ended(self, request_id: str) -> None:
        """Forget the rows of a request."""
        for key in [key for key in self._rows if key[0] == request_id]:
            del self._rows[key]

    def compare_pool(self, pool: HostPool) -> tuple[int, int]:
        """Compare every published page of the pool with what was computed.

        Returns:
            Pages that were compared, and those of them with a wrong byte in some layer.
        """
        known = self._digests.any(axis=1)
        published = np.asarray(pool.table["state"]) == int(BlockState.PUBLISHED)
        blocks = np.flatnonzero(known & published)
        wrong = np.zeros(len(blocks), bool)
        for layer, pages in enumerate(self._pages):
            held = pool.layer_view(layer)[torch.from_numpy(blocks)].numpy()
            wrong |= (held != pages[blocks]).any(axis=(1, 2))
        self.wrong_blocks.update(blocks[wrong].tolist())
        return len(blocks), int(wrong.sum())

    def read_from_host(self, layer: int, host_slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Compare rows with the ledger."""
        slots = host_slots.numpy()
        if not len(slots):
            return
        size = self._geometry.block_size
        expected = self._pages[layer][slots // size, slots % size]
        wrong = (rows.numpy() != expected).any(axis=1)
        self.checked_rows += len(slots)
        count = int(wrong.sum())
        if count:
            self.wrong_blocks.update((slots[wrong] // size).tolist())
        if count and not self.first_wrong:
            slot = int(slots[int(np.argmax(wrong))])
            self.first_wrong = f"layer {layer}, host block {slot // size}, row {slot % size}"
        self.wrong_rows += count


def _map_pages(
    path: Path, geometry: HostGeometry, num_blocks: int
) -> tuple[npt.NDArray[np.uint8], list[npt.NDArray[Any]]]:
    """Digests and rows over one sparse file.

    Returns:
        uint8 [num_blocks, digest], and one uint8 [num_blocks, block_size, row_bytes] a layer.
    """
    widths = [geometry.place(layer, num_blocks).row_bytes for layer in range(geometry.num_layers)]
    sizes = [num_blocks * geometry.block_size * width for width in widths]
    start = num_blocks * _DIGEST_BYTES
    with path.open("ab") as file:  # made by whichever rank comes first
        file.truncate(start + sum(sizes))
    whole = np.memmap(path, np.uint8, "r+")
    digests = whole[:start].reshape(num_blocks, _DIGEST_BYTES)
    pages: list[npt.NDArray[Any]] = []
    for width, size in zip(widths, sizes, strict=True):
        shape = (num_blocks, geometry.block_size, width)
        pages.append(whole[start : start + size].reshape(shape))
        start += size
    return digests, pages


class Choices:
    """The top-k of each token of each request: one file a request, int16 [groups, tokens, top_k].

    A set of workers that finds a prefix leaves the entries of the set that computed it.

    Args:
        directory: Of the demonstration.
        names: Its requests.
        shape: (index groups, tokens, top-k), large enough for each request.
    """

    def __init__(self, directory: Path, names: Iterable[str], shape: tuple[int, int, int]) -> None:
        self._files: dict[str, npt.NDArray[np.int16]] = {}
        for index, name in enumerate(names):
            path = directory / f"choices-{index}.npy"
            if not path.exists():
                np.save(path, np.full(shape, -1, np.int16), allow_pickle=False)
            self._files[name] = np.load(path, mmap_mode="r+", allow_pickle=False)

    def of(self, request_id: str) -> npt.NDArray[np.int16]:
        """One request's, to read or write."""
        return self._files[request_id]

    def save(self, path: Path) -> None:
        """Write all of them as they are now, in the order of the requests."""
        np.savez(path, *self._files.values(), allow_pickle=False)


class Settle(enum.Enum):
    """When the reference goes on with a choice of the ranks instead of its own."""

    TIES = "ties"
    """Where the two differ in rows of equal score; other differences are wrong."""
    ALWAYS = "always"
    """Everywhere: scores are as noisy as they are far from each other."""


class ChoiceCheck:
    """Compares the choices of the reference's indexers with those that the ranks made.

    Args:
        model: The reference; its indexers are wrapped for good.
        tolerance: Scores that differ by no more than this part of the greatest are equal.
        settle: When to go on with the ranks' choice.

    Attributes:
        checked: Choices compared: one a token and index group.
        ties: Those that differ in rows of equal score.
        wrong: Those that differ otherwise (with TIES).
        lanes: Rows that the reference chose.
        common: Those of them that the ranks chose too.
    """

    def __init__(self, model: Any, *, tolerance: float, settle: Settle = Settle.TIES) -> None:
        self.checked = self.ties = self.wrong = self.lanes = self.common = 0
        self.by_group: dict[int, list[int]] = {}
        self._tolerance = tolerance
        self._is_always = settle is Settle.ALWAYS
        self._choices: npt.NDArray[np.int16] | None = None
        leaders = [layer.self_attn.indexer for layer in model.model.layers]
        for group, indexer in enumerate(indexer for indexer in leaders if indexer is not None):
            self._wrap(indexer, group)

    def begin(self, choices: npt.NDArray[np.int16]) -> None:
        """Compare with this request's choices from now on."""
        self._choices = choices

    def take(self) -> dict[str, Any]:
        """What was found since the last call; lanes and common lanes of each index group too."""
        found = {
            "choices": self.checked,
            "ties": self.ties,
            "wrong_choices": self.wrong,
            "lanes": self.lanes,
            "common_lanes": self.common,
            "by_group": [self.by_group[group] for group in sorted(self.by_group)],
        }
        self.checked = self.ties = self.wrong = self.lanes = self.common = 0
        self.by_group = {}
        return found

    def _wrap(self, indexer: Any, group: int) -> None:
        choose = indexer.forward

        def checked(
            hidden_states: torch.Tensor,
            q_resid: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            attention_mask: torch.Tensor,
            position_ids: torch.Tensor,
            cache: Any = None,
        ) -> torch.Tensor:
            with _Scores() as seen:
                own = choose(
                    hidden_states, q_resid, position_embeddings, attention_mask, position_ids,
                    cache=cache,
                )  # fmt: skip
            return self._settle(own, seen.scores, position_ids[0], group)

        indexer.forward = checked

    def _settle(
        self, own: torch.Tensor, scores: torch.Tensor, positions: torch.Tensor, group: int
    ) -> torch.Tensor:
        """Own int32 [1, S, k], scores [1, S, T]; returns the choices to go on with."""
        if self._choices is None:
            return own
        theirs = torch.from_numpy(
            self._choices[group, positions.cpu().numpy()].astype(np.int64)
        ).to(own.device)
        width = scores.shape[-1]
        ours = _members(own[0].long(), positions, width)
        chosen = _members(theirs, positions, width)
        self.checked += len(positions)
        lanes, common = int(ours.sum()), int((ours & chosen).sum())
        self.lanes += lanes
        self.common += common
        group_lanes = self.by_group.setdefault(group, [0, 0])
        group_lanes[0] += lanes
        group_lanes[1] += common
        settled = own.clone()
        for token in (ours != chosen).any(dim=-1).nonzero().flatten().tolist():
            row = scores[0, token]
            if self._is_always and int(chosen[token].sum()) == own.shape[-1]:
                settled[0, token] = chosen[token].nonzero().flatten().to(own.dtype)
                continue
            out, into = row[ours[token] & ~chosen[token]], row[chosen[token] & ~ours[token]]
            equal = self._tolerance * float(row[: int(positions[token]) + 1].abs().max())
            if len(out) == len(into) and float(out.max() - into.min()) <= equal:
                self.ties += 1
                settled[0, token] = chosen[token].nonzero().flatten().to(own.dtype)
            else:
                self.wrong += 1
        return settled


class _Scores(TorchFunctionMode):
    """Sees the scores that the model's indexer chooses from: what it calls ``topk`` on."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.Tensor.topk:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


def _members(chosen: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Which positions are chosen, bool [S, width]: neither empty lanes nor later tokens are.

    Args:
        chosen: int64 [S, k], -1 = empty lane.
        positions: int64 [S]: the tokens that choose.
        width: Tokens to choose from.
    """
    members = torch.zeros((len(positions), width + 1), dtype=torch.bool, device=chosen.device)
    members.scatter_(1, chosen.remainder(width + 1), True)
    earlier = torch.arange(width, device=chosen.device) <= positions[:, None]
    return members[:, :-1] & earlier
