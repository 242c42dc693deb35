"""Files that are either whole or not there, and transformers saved in them."""

import errno
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a disk or a folder can refuse; other errors of a writer are its own and pass unchanged.
_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
}


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write to the yielded path beside `path`; it takes the place of `path` at once when the block ends.

    If the block raises or is interrupted, the partial file is deleted and the old file, if any, is as it was. What
    a killed process has left behind is deleted by the next write to the same path.

    Raises:
        OSError: the folder is missing, writing is not permitted, the disk is full, or `path` is a folder or a device.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "out.txt"
    >>> with atomic_write(file) as partial:
    ...     _ = partial.write_text("whole")
    >>> file.read_text()
    'whole'
    """
    final = Path(os.path.realpath(path))
    _check_place(path, final)
    # The stem is cut so that a long name stays within the 255 bytes that file systems allow.
    start = f".{final.stem[:40]}."
    partial = final.with_name(f"{start}{_owner(os.getpid())}-{secrets.token_hex(4)}.part{final.suffix}")
    _sweep(final, start)
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        if final.exists():
            shutil.copymode(final, partial)
        os.replace(partial, final)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        reason = os.strerror(error.errno)
        raise type(error)(f"{path}: could not be written: {reason}; what was there before is unchanged") from error
    finally:
        partial.unlink(missing_ok=True)


def _check_place(path: str | os.PathLike[str], final: Path) -> None:
    if not final.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {final.parent}; create it first")
    if final.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write to, got a folder")
    if final.exists() and not final.is_file():
        raise OSError(f"{path}: expected a file to write to, got a device or a pipe")
    if not os.access(final.parent, os.W_OK):
        raise PermissionError(f"{path}: writing in the folder {final.parent} is not permitted")


def _owner(pid: int) -> str:
    host = re.sub(r"[^A-Za-z0-9]", "_", socket.gethostname())[:40]
    return f"{host}-{pid}"


def _sweep(final: Path, start: str) -> None:
    # A leftover of another machine may belong to a run that is alive there: only this machine's are judged.
    owner = re.escape(_owner(0)).removesuffix("0")
    leftover = re.compile(re.escape(start) + owner + r"(\d+)-[0-9a-f]{8}\.part" + re.escape(final.suffix))
    for file in os.listdir(final.parent):
        found = leftover.fullmatch(file)
        if found and not _alive(int(found[1])):
            (final.parent / file).unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if os.name == "nt":
        # Signal 0 would end a process there; a leftover is the smaller harm.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
