"""The runtime directory: made closed, and refused when it is open, another's, or too long."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hisparse_service.contract.errors import RuntimeDirectoryError
from hisparse_service.contract.limits import MAX_UNIX_PATH_BYTES
from hisparse_service.server.runtime_directory import (
    CONTROL_SOCKET_NAME,
    check_path_length,
    control_endpoint,
    prepare_runtime_directory,
)


def test_it_is_made_with_its_parents_and_closed(runtime_dir: Path) -> None:
    made = runtime_dir / "a" / "b"
    prepare_runtime_directory(made)
    prepare_runtime_directory(made)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777])
def test_one_that_others_may_enter_is_refused_and_not_changed(runtime_dir: Path, mode: int) -> None:
    runtime_dir.chmod(mode)
    with pytest.raises(RuntimeDirectoryError, match="chmod 700"):
        prepare_runtime_directory(runtime_dir)
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == mode


def test_a_link_and_a_file_are_refused(runtime_dir: Path) -> None:
    (runtime_dir / "real").mkdir(mode=0o700)
    (runtime_dir / "link").symlink_to(runtime_dir / "real")
    (runtime_dir / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(RuntimeDirectoryError):
            prepare_runtime_directory(runtime_dir / name)


def test_the_longest_path_that_fits_is_taken_and_one_more_byte_is_not() -> None:
    room = MAX_UNIX_PATH_BYTES - len(f"/{CONTROL_SOCKET_NAME}")
    fits = Path("/" + "x" * (room - 1))
    check_path_length(fits)
    assert len(os.fsencode(control_endpoint(fits).removeprefix("ipc://"))) == MAX_UNIX_PATH_BYTES
    with pytest.raises(RuntimeDirectoryError, match="108 bytes"):
        check_path_length(Path("/" + "x" * room))
    with pytest.raises(RuntimeDirectoryError):
        check_path_length(Path("/" + "é" * (room // 2 + 1)))
