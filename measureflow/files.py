"""Files that are either whole or not there, and transformers saved in them."""

import errno
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from measureflow.attention import KERNELS, Kernel, get_kernel
from measureflow.errors import FileFormatError
from measureflow.transformer import Head, Layer, Perceptron, Transformer

FORMAT = 1

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


def save(theta: Transformer, path: str | os.PathLike[str]) -> None:
    """Save a transformer: its tensors as safetensors, the rest in a JSON header (`measureflow`).

    A layer that is used twice, or a tensor that stands in several places, is saved once and loaded as one. Fields that
    a subclass adds are not saved; what a construction has to say stands in its metadata.

    Raises:
        OSError: the file cannot be written; what was there before is unchanged.
        TypeError: the metadata are not JSON values, or a kernel is not one of `measureflow.attention.KERNELS`.

    >>> import tempfile, torch
    >>> from measureflow.transformer import constant_drift
    >>> file = Path(tempfile.mkdtemp()) / "theta.safetensors"
    >>> save(Transformer([Layer(perceptron=constant_drift(torch.ones(3)), stage="gather")]), file)
    >>> load(file).stages
    {'gather': 1}
    """
    tensors: dict[str, Tensor] = {}
    owners: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    places: dict[int, int] = {}
    layers: list[dict[str, Any]] = []
    for k, layer in enumerate(theta.layers):
        if (place := places.setdefault(id(layer), k)) < k:
            layers.append({"repeats": place})
            continue
        layers.append(_describe(layer))
        for part, tensor in layer.tensors():
            name = f"layers.{k}.{part}"
            owner = owners.setdefault(_identity(tensor), name)
            if owner == name:
                tensors[name] = tensor.detach().cpu().contiguous()
            else:
                shared[name] = owner
    header = {"format": FORMAT, "layers": layers, "shared": shared, "metadata": dict(theta.metadata)}
    try:
        text = json.dumps(header, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata: expected JSON values (text, finite numbers, lists, mappings): {error}") from error
    content = safetensors.torch.save(tensors, {"measureflow": text})
    with atomic_write(path) as partial:
        partial.write_bytes(content)


def load(path: str | os.PathLike[str]) -> Transformer:
    """Load a transformer that `save` has written, on the CPU, in the dtypes it had. Nothing in the file is run.

    Raises:
        FileFormatError: the file is truncated, foreign, of a later format, or its parts do not fit together.
        FileNotFoundError: there is no such file.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path}: expected a saved transformer, got a folder")
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("measureflow")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except safetensors.SafetensorError as error:
        raise FileFormatError(f"{path}: not a safetensors file, or one cut short: {error}") from error
    if text is None:
        raise FileFormatError(f"{path}: the tensors in this file are not a transformer saved by measureflow")
    return _rebuild(_header(text, path), tensors, path)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _describe(layer: Layer) -> dict[str, Any]:
    names = {kernel: name for name, kernel in KERNELS.items()}

    def kernel(given: Kernel) -> dict[str, Any]:
        if type(given) not in names:
            raise TypeError(f"kernel: only the kernels of measureflow.attention can be saved, got {given!r}")
        return {"name": names[type(given)], **asdict(given)}

    return {
        "stage": layer.stage,
        "duration": float(layer.duration),
        "heads": [{"kernel": kernel(get_kernel(head.kernel))} for head in layer.heads],
        "perceptron": None if layer.perceptron is None else {"activation": layer.perceptron.activation},
    }


def _header(text: str, path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
        version = header["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path}: the header cannot be read: {error!r}") from error
    if version != FORMAT:
        advice = "install a newer measureflow" if isinstance(version, int) and version > FORMAT else "save it again"
        raise FileFormatError(f"{path}: expected format {FORMAT}, got {version!r}; {advice}")
    return header


def _rebuild(header: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> Transformer:
    used: set[str] = set()

    def tensor(name: str) -> Tensor:
        owner = header["shared"].get(name, name)
        if owner not in tensors:
            raise FileFormatError(f"{path}: the tensor {owner!r} is missing")
        if not tensors[owner].is_floating_point():
            raise FileFormatError(f"{path}: {owner}: expected floating-point numbers, got {tensors[owner].dtype}")
        used.add(owner)
        return tensors[owner]

    layers: list[Layer] = []

    def layer(k: int, given: Mapping[str, Any]) -> Layer:
        if "repeats" in given:
            if given["repeats"] not in range(k):
                raise ValueError(f"repeats: expected an earlier layer, got {given['repeats']!r}")
            return layers[given["repeats"]]
        heads = []
        for i, head in enumerate(given["heads"]):
            options = dict(head["kernel"])
            kernel = KERNELS[options.pop("name")](**options)
            heads.append(Head(tensor(f"layers.{k}.heads.{i}.V"), tensor(f"layers.{k}.heads.{i}.B"), kernel))
        perceptron = None
        if given["perceptron"] is not None:
            W, U, b = (tensor(f"layers.{k}.perceptron.{part}") for part in ("W", "U", "b"))
            perceptron = Perceptron(W, U, b, given["perceptron"]["activation"])
        if not isinstance(given["stage"], str):
            raise TypeError(f"stage: expected text, got {given['stage']!r}")
        return Layer(heads, perceptron, given["duration"], given["stage"])

    place = "the header"
    try:
        for k, given in enumerate(header["layers"]):
            place = f"layer {k}"
            layers.append(layer(k, given))
        place = "the header"
        if not isinstance(header["metadata"], dict):
            raise TypeError(f"metadata: expected a mapping, got {header['metadata']!r}")
        theta = Transformer(layers, header["metadata"])
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise FileFormatError(f"{path}: {place}: {what}") from error
    if foreign := sorted(set(tensors) - used):
        raise FileFormatError(f"{path}: the tensor {foreign[0]!r} belongs to no layer")
    return theta
