"""`hisparse-service demo`: decode real text with a real model through the service, and check it.

One engine of several ranks runs some requests; then its workers end, and new ones on the same
daemon run them again and find the prefixes. What is checked:

- Each step of each rank against the same model and kernels with all rows on the device: logits,
  rows and choices must be equal bit for bit, in any type.
- Every token and logit against the model's own cache. That adds in another order: float32 must
  agree to its last digits, bfloat16 be as near to float32 as the model's own cache is.
- Every row that a rank read from host memory, and every page in the pool, against what rank 0
  computed.

The exit code is 0 only if all of that agrees and every mechanism (spill, miss, eviction, restore)
really ran.

This process imports no torch: it drives processes of `worker_client.integrations.demo_worker` in
lockstep, as an engine does its ranks. Main thread of the command.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Optional

import numpy as np
import typer

from hisparse_service.cli.demo_processes import PrivateDaemon, WorkerProcess, package_file
from hisparse_service.cli.demo_report import (
    Check,
    DemoReport,
    Phase,
    Progress,
    make_progress,
    print_report,
)
from hisparse_service.cli.exit_codes import FAILED, USAGE, exit_code_of
from hisparse_service.contract import limits
from hisparse_service.contract.errors import CapacityError, ConfigError, HiSparseError

_DTYPES: Final = ("float32", "bfloat16")
_TOLERANCE: Final = 1e-4
"""Greatest difference of a float32 logit: sums are in another order in the model's own cache."""
_NOISE_RATIO: Final = 1.25
"""bfloat16: how far the logits may be from float32, as a multiple of the model's own distance.

Both distances are root mean squares over thousands of logits of the same tokens, and both come from
the same number of roundings: on the shipped text they differ by a few percent.
"""
_LEAST_OVERLAP: Final = 0.98
"""bfloat16: part of the chosen rows that the model chooses too. The others are a few in a thousand,
at the edge of the top-k, where scores differ by less than their own rounding."""
_SHARED_BYTES: Final = 288
_SHORTEST_PROMPT: Final = 900
_PROMPT_STEP: Final = 130
_MAX_STEPS: Final = 100_000
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command was asked for."""

    workers: int = 2
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    text: Path | None = None
    steps: int = 48
    requests: int = 4
    pool_bytes: int = 48 * limits.MIB
    seed: int = 0
    endpoint: str = ""
    cuda_graphs: bool | None = None
    """Whether decode steps are replayed CUDA graphs; None: on a CUDA device."""
    corrupt_host_rows: bool = False

    @property
    def decode(self) -> Literal["static", "graph"]:
        """How decode steps are run."""
        wanted = self.device == "cuda" if self.cuda_graphs is None else self.cuda_graphs
        return "graph" if wanted else "static"

    def check(self) -> None:
        """Refuse options that cannot work.

        Raises:
            ConfigError: With the option.
        """
        for name, value, low, high in (
            ("--workers", self.workers, 1, 16),
            ("--steps", self.steps, 2, 2_048),
            ("--requests", self.requests, 1, 32),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} {value}: allowed are {low} to {high}")
        if self.decode == "graph" and self.device != "cuda":
            raise ConfigError(
                f"--cuda-graphs: there are none on --device {self.device}",
                remedy="Leave it out, or use --device cuda",
            )
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"the demonstration needs {' and '.join(missing)}",
                remedy="Install hisparse-service[transformers]",
            )


@dataclass
class _Run:
    """A demonstration under way."""

    options: DemoOptions
    directory: Path
    job: dict[str, Any]
    progress: Progress
    report: DemoReport
    faults_left: int = 0

    @property
    def job_path(self) -> Path:
        return self.directory / "job.json"

    @property
    def names(self) -> list[str]:
        return [request["name"] for request in self.job["requests"]]


def run_demo(options: DemoOptions, progress: Progress) -> DemoReport:
    """Run the demonstration and return what it found.

    Raises:
        HiSparseError: It could not run: options, daemon, memory.
    """
    options.check()
    text = options.text or package_file("integrations", "data", "memory_hierarchies.txt")
    requests = _requests(options, text)
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="hisparse-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        endpoint, pool_bytes = options.endpoint, 0
        if not endpoint:
            progress.say(f"starting a daemon with a pool of {_mib(options.pool_bytes)}")
            daemon = PrivateDaemon(options.pool_bytes, log=directory / "daemon.log")
            stack.callback(daemon.close)
            endpoint, pool_bytes = daemon.endpoint, options.pool_bytes
        job = {
            "endpoint": endpoint,
            "directory": str(directory),
            "text": str(text.absolute()),
            "requests": requests,
            "seed": options.seed,
            "device": options.device,
            "dtype": options.dtype,
            "decode": options.decode,
            "world_size": options.workers,
            "group": f"demo-{secrets.token_hex(4)}",
            "pool_bytes": pool_bytes,
        }
        run = _Run(options, directory, job, progress, DemoReport(text=str(text)))
        run.faults_left = int(options.corrupt_host_rows)
        run.job_path.write_text(json.dumps(job))
        reference = WorkerProcess(run.job_path, rank=-1)
        stack.callback(reference.stop)
        outcomes: list[_Outcome] = []
        for generation, title in enumerate(("first workers", "new workers, same daemon")):
            outcomes.append(_run_workers(run, generation, title))
            # It works on these while the next workers start.
            _ask_reference(run, reference, generation, outcomes[-1])
        reference.answer()
        for generation, outcome in enumerate(outcomes):
            _compare(run, generation, outcome, _take_reference(run, reference, generation))
        _check_mechanisms(run)
    return run.report


def _requests(options: DemoOptions, text: Path) -> list[dict[str, Any]]:
    """Prompts that begin alike and go on with a passage each, of different lengths."""
    try:
        text_bytes = text.stat().st_size
    except OSError as error:
        raise ConfigError(f"--text {text}: {error.strerror}") from error
    lengths = [_SHORTEST_PROMPT + index * _PROMPT_STEP for index in range(options.requests)]
    own_bytes = sum(length - _SHARED_BYTES for length in lengths)
    if text_bytes < _SHARED_BYTES + own_bytes:
        raise ConfigError(
            f"--text {text} has {text_bytes} bytes, {options.requests} prompts need "
            f"{_SHARED_BYTES + own_bytes}",
            remedy="Give a longer text, or fewer --requests",
        )
    requests: list[dict[str, Any]] = []
    offset = _SHARED_BYTES
    for index, length in enumerate(lengths):
        requests.append(
            {
                "name": f"request {index}",
                "shared_bytes": _SHARED_BYTES,
                "offset": offset,
                "length": length,
                "max_new_tokens": options.steps,
            }
        )
        offset += length - _SHARED_BYTES
    return requests


# --- one set of workers ---------------------------------------------------------------------------


@dataclass
class _Outcome:
    """What one set of workers generated: by rank and request."""

    tokens: list[dict[str, list[int]]]
    logits: list[Path]
    reports: list[dict[str, Any]]


def _run_workers(run: _Run, generation: int, title: str) -> _Outcome:
    """Start the ranks, run all requests in lockstep, end the ranks."""
    run.progress.say(f"{title}: starting {run.options.workers} processes")
    with _workers(run, generation) as ranks:
        hello = [rank.answer() for rank in ranks]
        run.report.sizes = hello[0]
        outcome = _Outcome([{name: [] for name in run.names} for _ in ranks], [], [])
        with run.progress.phase(title, len(run.names) * run.options.steps):
            _generate(run, ranks, outcome)
        outcome.logits = [
            run.directory / f"logits-{generation}-{index}.npz" for index in range(len(ranks))
        ]
        for rank, path in zip(ranks, outcome.logits, strict=True):
            choices = run.directory / f"choices-{generation}.npz"
            rank.ask("report", logits=str(path), choices=str(choices))
        outcome.reports = [rank.answer() for rank in ranks]
    prompt_tokens = sum(request["length"] for request in run.job["requests"])
    run.report.phases.append(Phase(title, prompt_tokens, outcome.reports))
    return outcome


@contextlib.contextmanager
def _workers(run: _Run, generation: int) -> Iterator[list[WorkerProcess]]:
    with contextlib.ExitStack() as stack:
        ranks: list[WorkerProcess] = []
        for rank in range(run.options.workers):
            ranks.append(WorkerProcess(run.job_path, rank=rank, generation=generation))
            stack.callback(ranks[-1].stop)
        yield ranks


def _generate(run: _Run, ranks: Sequence[WorkerProcess], outcome: _Outcome) -> None:
    waiting = list(range(len(run.names)))
    for _ in range(_MAX_STEPS):
        while waiting and _admit(ranks, waiting[0]):
            waiting.pop(0)
        for rank in ranks:
            rank.ask("step")
        answers = [rank.answer() for rank in ranks]
        for index, answer in enumerate(answers):
            for name, token, _ in answer["tokens"]:
                outcome.tokens[index][name].append(token)
        run.progress.advance(len(answers[0]["tokens"]), prefilled=answers[0]["prefilled"])
        going_on = [name for name, _, is_last in answers[0]["tokens"] if not is_last]
        if run.faults_left and going_on:
            _corrupt(run, ranks, going_on[0])
        if not waiting and not answers[0]["running"]:
            return
    raise CapacityError(f"the requests did not end within {_MAX_STEPS} steps")


def _admit(ranks: Sequence[WorkerProcess], index: int) -> bool:
    """Let a request in on every rank, or on none; rank 0 decides how much of it is a hit."""
    hit: int | None = None
    for rank in ranks:
        rank.ask("add", index=index, hit=hit)
        try:
            hit = rank.answer()["hit"]
        except CapacityError:
            if hit is not None:
                raise
            return False
    return True


def _corrupt(run: _Run, ranks: Sequence[WorkerProcess], name: str) -> None:
    """Damage pages in the host pool behind everyone's back (a test of the checks)."""
    ranks[0].ask("corrupt", request=name)
    if ranks[0].answer()["pages"]:
        run.faults_left = 0


# --- checks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Expected:
    """What the model generated for one request with its own cache.

    Attributes:
        tokens: Its tokens.
        logits: ``[tokens, vocabulary]``.
        exact: The same in float32, where the type is another; else None.
    """

    tokens: list[int]
    logits: Any
    exact: Any


def _ask_reference(run: _Run, reference: WorkerProcess, generation: int, outcome: _Outcome) -> None:
    """Let the same model with its own cache generate the same."""
    for index, name in enumerate(run.names):
        reference.ask(
            "run",
            index=index,
            logits=str(run.directory / f"reference-{generation}-{index}.npy"),
            choices=str(run.directory / f"choices-{generation}.npz"),
            tokens=outcome.tokens[0][name],
        )


def _take_reference(run: _Run, reference: WorkerProcess, generation: int) -> dict[str, _Expected]:
    """What it generated, and whether it chose the same rows."""
    expected: dict[str, _Expected] = {}
    found = dict.fromkeys(("choices", "ties", "wrong_choices", "lanes", "common_lanes"), 0)
    title = run.report.phases[generation].title
    with run.progress.phase(f"{title}: the model's own cache", len(run.names)):
        for index, name in enumerate(run.names):
            answer = reference.answer()
            path = run.directory / f"reference-{generation}-{index}.npy"
            exact = path.with_suffix(".exact.npy")
            expected[name] = _Expected(
                answer["tokens"],
                np.load(path, allow_pickle=False),
                np.load(exact, allow_pickle=False) if exact.exists() else None,
            )
            found = {what: count + answer[what] for what, count in found.items()}
            run.progress.advance(1)
    run.report.checks.append(_choice_check(title, found, run.options.dtype))
    return expected


def _choice_check(title: str, found: Mapping[str, int], dtype: str) -> Check:
    """Whether the model chose the same rows with its own cache."""
    if dtype == "float32":
        equal = found["choices"] - found["ties"] - found["wrong_choices"]
        detail = f"{equal:,} of {found['choices']:,} equal, {found['ties']:,} ties within rounding"
        return Check(f"{title}: top-k", found["wrong_choices"] == 0, detail)
    overlap = found["common_lanes"] / max(found["lanes"], 1)
    return Check(
        f"{title}: top-k, by the model's own cache",
        overlap >= _LEAST_OVERLAP and found["wrong_choices"] == 0,
        f"{overlap:.2%} of {found['lanes']:,} rows chosen by both, {_LEAST_OVERLAP:.0%} required",
    )


def _compare(
    run: _Run, generation: int, outcome: _Outcome, all_expected: Mapping[str, _Expected]
) -> None:
    """Every token, every logit, every host row."""
    title = run.report.phases[generation].title
    for rank, (tokens, path) in enumerate(zip(outcome.tokens, outcome.logits, strict=True)):
        where, counters = f"{title}, rank {rank}", outcome.reports[rank]
        run.report.checks += _exactness_checks(where, counters)
        run.report.lines += [f"{where}: {line}" for line in counters["twin_lines"]]
        with np.load(path, allow_pickle=False) as logits:
            own = {name: (tokens[name], logits[name]) for name in all_expected}
        compare = _compare_float32 if run.options.dtype == "float32" else _compare_bfloat16
        run.report.checks += compare(where, own, all_expected)
        checked, bad = counters["checked_rows"], counters["wrong_rows"]
        detail = f"{checked - bad} of {checked} equal rank 0's bytes"
        if bad:
            detail += f"; first: {counters['first_wrong']}"
        run.report.checks.append(Check(f"{where}: host rows", bad == 0 and checked > 0, detail))
        if rank == 0:
            run.report.checks.append(_pool_check(where, counters, run.options.decode))


def _exactness_checks(where: str, counters: Mapping[str, Any]) -> list[Check]:
    """Bit for bit against the same model and kernels with all rows on the device."""
    found = {name: counters[f"twin_{name}"] for name in ("logits", "rows", "choices", "pages")}
    unequal = {name: counters[f"twin_unequal_{name}"] for name in ("logits", "rows", "choices")}
    wrong = counters["twin_wrong_tokens"] + counters["twin_foreign_pages"]
    detail = ", ".join(f"{found[name] - bad:,} of {found[name]:,} {name}"
                       for name, bad in unequal.items())  # fmt: skip
    if any(unequal.values()):
        detail += f"; logits differ by up to {counters['twin_largest']:.1e}"
    if wrong:
        detail += (
            f"; {counters['twin_wrong_tokens']} wrong tokens, {counters['twin_foreign_pages']} "
            "pages of other tokens"
        )
    is_good = not any(unequal.values()) and not wrong and min(found.values()) > 0
    return [Check(f"{where}: equal bit for bit to all rows on the device", is_good, detail)]


def _pool_check(where: str, counters: Mapping[str, Any], decode: str) -> Check:
    """Whether the pages in host memory, those that decode steps mirrored among them, are right."""
    pages, bad, rows = (counters[n] for n in ("pool_pages", "wrong_pool_pages", "mirrored_rows"))
    withdrawn = f"; the daemon withdrew {counters['withdrawn_pages']}" if bad else ""
    by = f"{counters['graph_replays']:,} replayed graphs" if decode == "graph" else "decode steps"
    return Check(
        f"{where}: pages in the pool",
        bad == 0
        and pages > 0
        and rows > 0
        and (decode != "graph" or counters["graph_replays"] > 0),
        f"{pages - bad:,} of {pages:,} equal; {rows:,} rows mirrored by {by}{withdrawn}",
    )


_Own = dict[str, tuple[list[int], Any]]
"""By request: a rank's tokens, and its logits [tokens, vocabulary]."""


def _compare_float32(where: str, own: _Own, all_expected: Mapping[str, _Expected]) -> list[Check]:
    worst, wrong, count = 0.0, 0, 0
    for name, expected in all_expected.items():
        tokens, logits = own[name]
        wrong += sum(a != b for a, b in zip(tokens, expected.tokens, strict=False))
        wrong += abs(len(tokens) - len(expected.tokens))
        count += len(expected.tokens)
        worst = max(worst, _worst_difference(logits, expected.logits))
    return [
        Check(f"{where}: tokens", wrong == 0, f"{count - wrong} of {count} equal"),
        Check(
            f"{where}: logits",
            worst <= _TOLERANCE,
            f"differ by {worst:.1e} at most, {_TOLERANCE:g} allowed",
        ),
    ]


def _compare_bfloat16(where: str, own: _Own, all_expected: Mapping[str, _Expected]) -> list[Check]:
    """The distance to float32 arithmetic, beside that of the model with its own cache."""
    names = list(all_expected)
    if any(own[name][1].shape != all_expected[name].logits.shape for name in names):
        return [Check(f"{where}: logits, by the model's own cache", False, "others in number")]
    ours = np.concatenate([own[name][1] for name in names])
    theirs = np.concatenate([all_expected[name].logits for name in names])
    exact = np.concatenate([all_expected[name].exact for name in names])
    noise, allowed = _rms(ours - exact), _NOISE_RATIO * _rms(theirs - exact)
    equal = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    return [
        Check(
            f"{where}: logits, by the model's own cache",
            bool(noise <= allowed),
            f"{noise:.2e} rms off float32, its own {_rms(theirs - exact):.2e} "
            f"({_NOISE_RATIO:g}x allowed); {_rms(ours - theirs):.1e} off its own, "
            f"{float(np.abs(ours - theirs).max()):.1e} at most; "
            f"{equal} of {len(ours)} tokens equal",
        )
    ]


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _worst_difference(logits: Any, expected: Any) -> float:
    if logits.shape != expected.shape:
        return float("inf")
    difference = float(np.abs(logits - expected).max())
    return difference if np.isfinite(difference) else float("inf")


def _check_mechanisms(run: _Run) -> None:
    """The demonstration shows nothing unless all of this really happened, on every rank."""
    first, second = run.report.phases[0], run.report.phases[1]
    happened = {
        "pages spilled": [rank["spilled_pages"] for rank in first.ranks],
        "rows missed": [rank["miss_rows"] for rank in first.ranks],
        "hot rows evicted": [rank["evicted_hot_rows"] for rank in first.ranks],
        "pages restored": [
            one["restored_pages"] + two["restored_pages"]
            for one, two in zip(first.ranks, second.ranks, strict=True)
        ],
        "prefix tokens found again": [rank["hit_tokens"] for rank in second.ranks],
    }
    for what, counts in happened.items():
        detail = ", ".join(f"{count:,}" for count in counts)
        run.report.checks.append(Check(what, min(counts) > 0, f"{detail} (by rank)"))
    reading = [rank["published_pages"] - rank["mirrored_pages"] for rank in first.ranks[1:]]
    mirrored = [rank["mirrored_pages"] for rank in first.ranks[1:] + second.ranks[1:]]
    run.report.checks.append(
        Check(
            "rank 0 alone writes",
            not any(mirrored),
            f"the others mirrored {sum(mirrored)} pages and found {sum(reading):,} published",
        )
    )


# --- the command ----------------------------------------------------------------------------------


def demo(
    workers: Annotated[int, typer.Option(help="Ranks of the engine: 0 writes, others read")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Text to read; the one that is shipped by default"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Tokens to generate for each request")] = 48,
    requests: Annotated[int, typer.Option(help="Requests at once")] = 4,
    pool_bytes: Annotated[
        str, typer.Option(help='Pool of the private daemon, such as "48MiB"')
    ] = "48MiB",
    seed: Annotated[int, typer.Option(help="Of the model's weights")] = 0,
    endpoint: Annotated[
        str, typer.Option(help="Runtime directory of a running daemon, instead of a private one")
    ] = "",
    cuda_graphs: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Replay decode steps as CUDA graphs  [default: with --device cuda]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON")] = False,
    corrupt_host_rows: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Decode real text through the service and check every token."""
    from hisparse_service.config import parse_bytes

    if device not in ("cpu", "cuda") or dtype not in _DTYPES:
        raise ConfigError(f"--device {device} --dtype {dtype}: see --help for what there is")
    options = DemoOptions(
        workers=workers,
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        text=text,
        steps=steps,
        requests=requests,
        pool_bytes=parse_bytes(pool_bytes),
        seed=seed,
        endpoint=endpoint,
        cuda_graphs=cuda_graphs,
        corrupt_host_rows=corrupt_host_rows,
    )
    report = run_demo(options, make_progress(is_quiet=as_json))
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        print_report(report)
    raise typer.Exit(0 if report.is_good else FAILED)


def main(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; returns its exit code."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(demo)
    command = typer.main.get_command(app)
    try:
        # Without standalone mode an Exit is not raised: its code is what comes back.
        status = command.main(
            list(arguments), prog_name="hisparse-service demo", standalone_mode=False
        )
    except HiSparseError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Exception as error:
        # typer's usage errors are click's, which it may carry along under its own name.
        if not hasattr(error, "show"):
            raise
        error.show()
        return USAGE
    return int(status or 0)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / limits.MIB:.0f} MiB"
