"""Write the reference pages: settings, protocol, errors, metrics, commands.

    python docs/generate.py            write docs/reference/*.md
    python docs/generate.py --check    exit 1 and name the pages that are stale

Descriptions come from docstrings, read out of the source: the line of text below a field. Nothing
here is imported by the package.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec

ROOT: Final = Path(__file__).resolve().parents[1]
REFERENCE: Final = ROOT / "docs" / "reference"
CAPACITY: Final = ROOT / "docs" / "capacity.md"
HEADER: Final = "<!-- Written by docs/generate.py from {source}. Edit that, then run it again. -->"


# --- reading the code ---------------------------------------------------------------------------


def field_texts(made: type) -> dict[str, str]:
    """Field name to the string below it; a field without one shares none with its neighbour."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(made)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    texts: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split())
        texts[node.target.id] = text
    return texts


def document(made: type) -> str:
    """The class's docstring as paragraphs of one line each."""
    text = inspect.cleandoc(made.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def type_text(annotation: Any) -> str:
    """A type and its bounds, in words."""
    bounds = ""
    if get_origin(annotation) is Annotated:
        annotation, *metas = get_args(annotation)
        bounds = "".join(_bounds(meta) for meta in metas if isinstance(meta, msgspec.Meta))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType:
        name = " or ".join(type_text(each) for each in arguments)
    elif origin in (list, dict, tuple):
        inner = ", ".join(type_text(each) for each in arguments if each is not Ellipsis)
        name = f"{origin.__name__} of {inner}"
    elif origin is not None and str(origin) == "typing.Literal":
        name = " or ".join(f"`{json.dumps(each)}`" for each in arguments)
    else:
        name = getattr(annotation, "__name__", str(annotation)).replace("NoneType", "none")
    return name + bounds


def _bounds(meta: msgspec.Meta) -> str:
    if meta.pattern:
        return f" that matches `{meta.pattern}`"
    low = meta.ge if meta.ge is not None else meta.gt
    high = meta.le if meta.le is not None else meta.lt
    if meta.gt is not None:
        return f", over {_number(meta.gt)}" + (f", at most {_number(high)}" if high else "")
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    if low is not None:
        return f", at least {_number(low)}"
    if meta.min_length is not None and meta.min_length == meta.max_length:
        return f", {meta.max_length} long"
    return f", at most {meta.max_length:,} long" if meta.max_length is not None else ""


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 2**31:
        for rest in (0, 1, 2):
            power = value + rest
            if power & (power - 1) == 0:
                return f"2^{power.bit_length() - 1}" + (f" - {rest}" if rest else "")
    return f"{value:,}" if abs(value) < 2**53 else f"{value:g}"


def _cell(text: str) -> str:
    # Outside of code, <name> would be taken for HTML.
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|").replace("\n", " "))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    lines += [f"| {' | '.join(_cell(each) for each in row)} |" for row in rows]
    return "\n".join(lines)


# --- pages --------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every setting, its variable, its default, its meaning."""
    from hisparse_service import config

    parts = [
        "# Settings",
        "A file (TOML, `--config` or `HISPARSE_CONFIG`) < environment < flags. The variable of "
        "`pool.bytes` is `HISPARSE_POOL__BYTES`, and so on; as a flag any setting is "
        '`--set section.name=value`. Sizes are written as `"8GiB"` or as a number of bytes. '
        "`hisparse-service config show` prints each value and where it came from; an unknown name "
        "is an error.",
    ]
    top, sections = [], []
    for field in msgspec.structs.fields(config.Settings):
        is_section = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        (sections if is_section else top).append(field)
    texts = field_texts(config.Settings)
    parts += ["## General", _settings_table("", top, texts)]
    for field in sections:
        parts += [
            f"## [{field.name}]", document(field.type),
            _settings_table(
                f"{field.name}.", msgspec.structs.fields(field.type), field_texts(field.type)
            ),
        ]  # fmt: skip
    return "\n\n".join(parts)


def _settings_table(prefix: str, fields: Iterable[Any], texts: Mapping[str, str]) -> str:
    from hisparse_service import config

    rows = []
    for field in fields:
        dotted = prefix + field.name
        default = config.DEFAULTS[dotted]
        is_size = field.type == config.ByteCount
        shown = json.dumps(f"{default / 2**30:g}GiB" if is_size else default)
        kind = "size" if is_size else type_text(field.type)
        rows.append((f"`{dotted}`", f"`{shown}`", kind, texts[field.name]))
    return table(("setting", "default", "type", "meaning"), rows)


def protocol_page() -> str:
    """Every message of the control protocol."""
    from hisparse_service.contract import limits, messages

    module = inspect.cleandoc(messages.__doc__ or "").split("\n\n")
    replies = {each.__struct_config__.tag: each for each in get_args(messages.AnyReply)}
    parts = [
        "# Control protocol",
        *(" ".join(part.split()) for part in module),
        f"This code speaks versions {limits.PROTOCOL_MIN} to {limits.PROTOCOL_MAX}. A message has "
        f"at most {limits.MAX_MESSAGE_BYTES:,} bytes; the daemon's socket drops connections that "
        f"send more than {limits.MAX_FRAME_BYTES:,}.",
        "## Requests",
    ]
    for tag, made in messages.REQUEST_TYPES.items():
        parts += _message(made, tag)
    parts.append("## Replies")
    for tag, made in replies.items():
        parts += _message(made, tag)
    parts += [
        "## Events",
        "Published on `events.sock` as two frames, topic and message: "
        f"`{messages.TOPIC_EPOCH.decode()}`, `{messages.TOPIC_PUBLISHED.decode()}`, "
        f"`{messages.TOPIC_EVICTED.decode()}`.",
    ]
    for made in get_args(messages.Event):
        parts += _message(made, made.__struct_config__.tag)
    parts.append("## Items of lists")
    for made in (
        messages.EnqueuedItem, messages.CompletedItem, messages.ReserveItem, messages.ReservedItem,
    ):  # fmt: skip
        parts += _message(made, None)
    return "\n\n".join(parts)


def _message(made: type, tag: Any) -> list[str]:
    texts = field_texts(made)
    inherited = {"request_id": "Chosen by the client.", "epoch": "The daemon's boot id."}
    rows = []
    for field in msgspec.structs.fields(made):
        default = "" if field.default is msgspec.NODEFAULT else f"`{field.default!r}`"
        if field.default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = f"`{field.default_factory()!r}`"
        text = texts.get(field.name) or inherited.get(field.name, "")
        rows.append((f"`{field.name}`", type_text(field.type), default, text))
    title = f"### {made.__name__}" + ("" if tag is None else f" (tag {tag})")
    return [title, document(made), table(("field", "type", "default", ""), rows)]


def errors_page() -> str:
    """The tree of errors, with links to what to do."""
    from hisparse_service.cli.exit_codes import exit_code_of
    from hisparse_service.contract.errors import HiSparseError

    rows = []
    for code, made in sorted(HiSparseError.registry.items()):
        if not made.__module__.endswith("contract.errors"):
            continue
        kind = made.__mro__[1].__name__
        rows.append(
            (
                f"[`{code}`](../troubleshooting.md#{code.lower()})", f"`{kind}`",
                " ".join((made.__doc__ or "").split()), str(exit_code_of(made(""))),
            )
        )  # fmt: skip
    return "\n\n".join(
        [
            "# Errors",
            "One tree, split by what the caller does next. The code is the class's name, in the "
            "client's exception, on the wire and on the command line (`Code: message`).",
            table(("code", "is a", "meaning", "exit code"), rows),
        ]
    )


def metric_families() -> Iterable[Any]:
    """Every metric that a scrape shows, with its labels."""
    from hisparse_service.telemetry.metrics import ServerMetrics, registry

    return registry(_sample_metrics(ServerMetrics)).collect()


def metrics_page() -> str:
    """Every metric that a scrape shows."""
    rows = []
    for family in metric_families():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        rows.append(
            (f"`{family.name}{suffix}`", family.type, ", ".join(f"`{each}`" for each in labels),
             family.documentation)
        )  # fmt: skip
    return "\n\n".join(
        [
            "# Metrics",
            "All of one daemon, on `/metrics`. Labels are bounded: namespaces, states, message "
            "types, error codes and causes of the code. `hisparse_worker_*` are sums over the "
            "node's workers, as their heartbeats report them.",
            table(("metric", "type", "labels", "meaning"), rows),
        ]
    )


def _sample_metrics(make: Callable[[], Any]) -> Any:
    """Metrics with one of everything, so that each family has a sample and shows its labels."""
    metrics = make()
    metrics.latency_of("Ping").observe_ns(1)
    metrics.count_error("CapacityError")
    metrics.count_death("process_ended")
    metrics.adopted_blocks["kept"] = 1
    metrics.snapshot = {
        "sessions": {"by_state": {"workers": {"alive": 1}}},
        "pool": {f"{use}_bytes": 1 for use in ("directory", "tables", "payload", "free")},
        "helpers": {"http": {"alive": True, "restarts": 0, "permanent": True}},
        "device": {
            "devices": [
                {"device_uuid": "", "context_bytes": 1, "child": "open", "backings": []},
            ],
        },
        "namespaces": [
            {
                "namespace": 1, "name": "", "layout": "", "block_size": 64, "blocks": {"free": 1},
                "statistics": _Ones(refusals={"CapacityError": 1}, checks={"damaged": 1}),
            }
        ],
    }  # fmt: skip
    import numpy as np

    from hisparse_service.telemetry.backings import BackingView, MirrorClock

    metrics.backings[1] = BackingView(
        namespace_id=1, name="", block_stride_bytes=1, state=np.zeros(2, np.uint8),
        readers=np.zeros(2, np.uint32), clock=MirrorClock(2),
    )  # fmt: skip
    return metrics


class _Ones(dict[str, Any]):
    """A mapping that has every counter."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if key in self else 1


def commands_page() -> str:
    """Every sub-command, as its own help shows it."""
    import typer.main

    from hisparse_service.cli.main import app

    parts = [
        "# Commands",
        "Each takes `--help`. Exit codes: 0 done, 1 failed, 2 wrong command line, 3 settings or "
        "limits, 4 not now, 5 no daemon there, 6 a segment that is not ours, 70 a bug.",
    ]
    group = typer.main.get_command(app)
    parts += _commands(group, "hisparse-service")
    return "\n\n".join(parts)


def _commands(group: Any, prefix: str) -> list[str]:
    parts: list[str] = []
    for name in sorted(group.commands):
        command = group.commands[name]
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            parts += _commands(command, f"{prefix} {name}")
            continue
        text = " ".join((command.help or "").split("\f")[0].split())
        parts += [f"## {prefix} {name}", text]
        if command.context_settings.get("ignore_unknown_options"):
            command = _passed_through(name)
        rows = [
            (
                ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts)),
                "" if parameter.default in (None, False, "", ()) else f"`{parameter.default}`",
                getattr(parameter, "help", None) or "",
            )
            for parameter in command.params
            if parameter.opts
            and parameter.name != "help"
            and not getattr(parameter, "hidden", False)
        ]
        if rows:
            parts.append(table(("option", "default", ""), rows))
    return parts


def _passed_through(name: str) -> Any:
    """The command behind one that hands its words on."""
    import importlib

    import typer.main

    module = importlib.import_module(f"hisparse_service.cli.{name}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(getattr(module, name))
    return typer.main.get_command(app)


PAGES: Final[Mapping[str, tuple[str, Callable[[], str]]]] = {
    "settings.md": ("hisparse_service/config.py", settings_page),
    "protocol.md": ("hisparse_service/contract/messages.py", protocol_page),
    "errors.md": ("hisparse_service/contract/errors.py", errors_page),
    "metrics.md": ("hisparse_service/telemetry/metrics.py", metrics_page),
    "commands.md": ("hisparse_service/cli", commands_page),
}


_PLAN: Final = re.compile(r"(<!-- plan: [^\n]*-->\n).*?(<!-- end of plan -->)", re.DOTALL)


def capacity_page() -> str:
    """docs/capacity.md with the example's answer as the command gives it."""
    from typer.testing import CliRunner

    from hisparse_service.cli.main import app

    arguments = "plan --model deepseek-v3.2 --context 131072 --concurrency 64 --hot-rows 6144"
    answer = CliRunner().invoke(app, arguments.split())
    if answer.exit_code:
        raise RuntimeError(f"hisparse-service {arguments} failed: {answer.output}")
    block = f"```\n{answer.output.rstrip()}\n```\n"
    text = CAPACITY.read_text(encoding="utf-8")
    return _PLAN.sub(lambda found: found[1] + block + found[2], text)


def rendered() -> dict[Path, str]:
    """Path to content of every generated page."""
    pages = {}
    for name, (source, make) in PAGES.items():
        text = f"{HEADER.format(source=source)}\n\n{make()}\n"
        pages[REFERENCE / name] = re.sub(r"\n{3,}", "\n\n", text)
    pages[CAPACITY] = capacity_page()
    return pages


def main() -> int:
    """Write the pages, or say which are stale."""
    parser = argparse.ArgumentParser(description="Write docs/reference.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    stale = []
    for path, text in rendered().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{'stale' if arguments.check else 'written'}: {path}\n")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
