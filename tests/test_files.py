import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch

from measureflow.attention import KERNELS
from measureflow.attention.kernels import Softmax
from measureflow.errors import FileFormatError
from measureflow.files import atomic_write, load, save
from measureflow.transformer import Head, Layer, Perceptron, Transformer, constant_drift, saturating_gate

bad_input = pytest.mark.bad_input


def random_transformer(dtype: torch.dtype = torch.float64, kernels=("softmax",)) -> Transformer:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    gate = saturating_gate(draw(3), 0.1, 0.2, draw(3))
    layers = [
        Layer([Head(draw(3, 3), draw(3, 3), name) for name in kernels], None, 0.1, "gather"),
        Layer([Head(draw(3, 3), draw(3, 3))], Perceptron(draw(3, 5), draw(5, 3), draw(5), "tanh"), 1 / 3, "route"),
        Layer(perceptron=gate, duration=7.25),
    ]
    return Transformer(layers, {"seed": 3, "note": "π", "w2": [1e-9, None], "nested": {"a": True}})


def tensors(theta: Transformer) -> list[torch.Tensor]:
    return [tensor for layer in theta.layers for _, tensor in layer.tensors()]


def leftovers(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if ".part" in file.name)


def test_a_file_appears_only_when_whole(tmp_path):
    file = tmp_path / "a.txt"
    with atomic_write(file) as partial:
        assert partial.parent == tmp_path
        assert partial.suffix == ".txt"
        partial.write_text("new")
        assert not file.exists()
    assert file.read_text() == "new"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("failure", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_or_interrupted_write_leaves_the_old_file(tmp_path, failure):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(type(failure)), atomic_write(file) as partial:  # noqa: PT012
        partial.write_text("half")
        raise failure
    assert file.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_link_stays_a_link_and_permissions_stay(tmp_path):
    file, link = tmp_path / "a.txt", tmp_path / "link.txt"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    with atomic_write(link) as partial:
        partial.write_text("new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o600


def test_long_names_and_names_with_signs(tmp_path):
    for name in ("x" * 200 + ".csv", "a [b] (c).csv", "ü" * 100 + ".csv", "a.b.c"):
        with atomic_write(tmp_path / name) as partial:
            partial.write_text(name)
        assert (tmp_path / name).read_text() == name


@bad_input
def test_places_that_cannot_be_written_to(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; create it first"),
        atomic_write(tmp_path / "missing" / "a.txt"),
    ):
        pass
    with pytest.raises(IsADirectoryError, match="expected a file to write to, got a folder"), atomic_write(tmp_path):
        pass
    with (
        pytest.raises(OSError, match="/dev/null: expected a file to write to, got a device"),
        atomic_write("/dev/null"),
    ):
        pass
    assert Path("/dev/null").is_char_device()


@bad_input
def test_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"^[^\n]*a.txt: writing in the folder [^\n]* is not permitted$"):
        atomic_write(tmp_path / "a.txt").__enter__()


@bad_input
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path, monkeypatch, code, step):
    file = tmp_path / "theta.safetensors"
    theta = random_transformer()
    save(theta, file)

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, step, refuse)
    with pytest.raises(OSError, match=r"^[^\n]*theta.safetensors: could not be written: [^\n]* is unchanged$"):
        save(random_transformer(torch.float32), file)
    assert tensors(load(file))[0].dtype == torch.float64
    assert leftovers(tmp_path) == []


@bad_input
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_disk_that_fills_up_while_writing(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(OSError, match="could not be written: No space left on device"), atomic_write(file) as partial:  # noqa: PT012
        partial.symlink_to("/dev/full")
        partial.write_text("new")
    assert file.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_errors_of_the_writer_itself_pass_unchanged(tmp_path):
    with pytest.raises(BrokenPipeError, match="ffmpeg"), atomic_write(tmp_path / "a.mp4"):
        raise BrokenPipeError(errno.EPIPE, "ffmpeg ended")


WRITE_AND_WAIT = """
import sys, time
from measureflow.files import atomic_write
with atomic_write(sys.argv[1]) as partial:
    partial.write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


def killed_write(file: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITE_AND_WAIT, str(file)], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)


def test_p35_a_killed_write_leaves_the_old_file_and_the_next_write_sweeps(tmp_path):
    file, other = tmp_path / "a.txt", tmp_path / "b.txt"
    file.write_text("old")
    killed_write(file)
    assert file.read_text() == "old"
    assert len(leftovers(tmp_path)) == 1
    with atomic_write(other) as partial:
        partial.write_text("other")
    assert len(leftovers(tmp_path)) == 1
    with atomic_write(file) as partial:
        assert len(leftovers(tmp_path)) == 0
        partial.write_text("new")
    assert file.read_text() == "new"
    assert leftovers(tmp_path) == []


def test_p35_a_write_that_is_still_going_on_is_not_swept(tmp_path):
    file = tmp_path / "a.txt"
    with atomic_write(file) as first:
        first.write_text("first")
        with atomic_write(file) as second:
            second.write_text("second")
        assert first.exists()
    assert file.read_text() == "first"


def test_p35_a_checkpoint_killed_at_any_moment_loads(tmp_path):
    file = tmp_path / "theta.safetensors"
    save(random_transformer(), file)
    program = (
        "import sys\nfrom measureflow.files import load, save\ntheta = load(sys.argv[1])\nprint('go', flush=True)\n"
        "while True:\n    save(theta, sys.argv[1])\n"
    )
    for wait in (0.0, 0.011, 0.023):
        with subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
        assert len(load(file).layers) == 3
    save(random_transformer(), file)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_transformer_comes_back_bit_for_bit(tmp_path, dtype):
    theta = random_transformer(dtype)
    save(theta, tmp_path / "theta.safetensors")
    again = load(tmp_path / "theta.safetensors")
    assert [(a.dtype, a.shape) for a in tensors(again)] == [(a.dtype, a.shape) for a in tensors(theta)]
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(theta), strict=True))
    assert [layer.duration for layer in again.layers] == [layer.duration for layer in theta.layers]
    assert [layer.stage for layer in again.layers] == ["gather", "route", ""]
    assert again.layers[1].perceptron.activation == "tanh"
    assert again.metadata == theta.metadata


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kernel_comes_back(tmp_path, name):
    theta = random_transformer(kernels=(name, "softmax"))
    save(theta, tmp_path / "theta.safetensors")
    again = load(tmp_path / "theta.safetensors")
    assert [head.kernel for head in again.layers[0].heads] == [head.kernel for head in theta.layers[0].heads]


def test_options_of_a_kernel_come_back(tmp_path):
    kernel = KERNELS["sigmoid"](bias=-1.25)
    save(Transformer([Layer([Head(torch.eye(3), torch.eye(3), kernel)])]), tmp_path / "theta.safetensors")
    assert load(tmp_path / "theta.safetensors").layers[0].heads[0].kernel == kernel


@bad_input
def test_a_kernel_of_ones_own_cannot_be_saved(tmp_path):
    class Own(Softmax):
        pass

    theta = Transformer([Layer([Head(torch.eye(3), torch.eye(3), Own())])])
    with pytest.raises(TypeError, match=r"kernel: only the kernels of measureflow.attention can be saved, got "):
        save(theta, tmp_path / "theta.safetensors")


def test_p33_a_layer_used_twice_is_saved_once_and_stays_shared(tmp_path):
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    big = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    layer = Layer([Head(big, torch.eye(40))])
    save(Transformer([layer]), once)
    save(Transformer([layer, Layer([Head(torch.eye(40), big)]), layer]), twice)
    # Ten times less than the 6,400 bytes of one more copy of `big`, apart from the one new identity.
    assert twice.stat().st_size - once.stat().st_size < 6_400 + 640
    first, middle, last = load(twice).layers
    assert first is last
    assert first.heads[0].V is middle.heads[0].B
    assert first.heads[0].B is not middle.heads[0].V


def test_p33_views_of_one_storage_are_kept_apart(tmp_path):
    base = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    save(Transformer([Layer([Head(base, base.mT)])]), tmp_path / "theta.safetensors")
    head = load(tmp_path / "theta.safetensors").layers[0].heads[0]
    assert torch.equal(head.V, base)
    assert torch.equal(head.B, base.mT)


def test_trained_parameters_are_saved_as_plain_numbers(tmp_path):
    w = torch.nn.Parameter(torch.ones(3))
    theta = Transformer([Layer(perceptron=constant_drift(w))])
    save(theta, tmp_path / "theta.safetensors")
    assert not any(tensor.requires_grad for tensor in tensors(load(tmp_path / "theta.safetensors")))


def test_a_subclass_is_saved_as_the_transformer_that_it_is(tmp_path):
    @dataclass(frozen=True, eq=False)
    class Certified(Transformer):
        certificate: object = None

    theta = random_transformer()
    save(Certified(theta.layers, {"certificate": {"w2": [1e-9]}}, object()), tmp_path / "theta.safetensors")
    again = load(tmp_path / "theta.safetensors")
    assert type(again) is Transformer
    assert again.metadata == {"certificate": {"w2": [1e-9]}}
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(theta), strict=True))


def test_the_method_of_a_transformer_saves_too(tmp_path):
    random_transformer().save(tmp_path / "theta.safetensors")
    assert load(tmp_path / "theta.safetensors").metadata["seed"] == 3


def test_equal_transformers_give_equal_files(tmp_path):
    for name in ("a", "b"):
        save(random_transformer(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@bad_input
@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(2)])
def test_metadata_that_is_not_json_is_refused_before_writing(tmp_path, value):
    theta = Transformer(random_transformer().layers, {"x": value})
    with pytest.raises(TypeError, match=r"^metadata: expected JSON values [^\n]*$"):
        save(theta, tmp_path / "theta.safetensors")
    assert list(tmp_path.iterdir()) == []


def one_line(error: pytest.ExceptionInfo[BaseException], file: Path) -> None:
    assert str(error.value).startswith(f"{file}: ")
    assert "\n" not in str(error.value)


@bad_input
def test_a_file_cut_short_anywhere(tmp_path):
    whole = tmp_path / "whole.safetensors"
    save(random_transformer(), whole)
    content = whole.read_bytes()
    file = tmp_path / "short.safetensors"
    for size in [0, 1, 7, 8, 9, *range(50, len(content), 97), len(content) - 1]:
        file.write_bytes(content[:size])
        with pytest.raises(FileFormatError, match="not a safetensors file, or one cut short") as error:
            load(file)
        one_line(error, file)


@bad_input
def test_p40_pickled_objects_are_refused_and_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    archive = io.BytesIO()
    torch.save({"theta": Trap()}, archive)
    for content in (pickle.dumps(Trap()), archive.getvalue()):
        file = tmp_path / "theta.safetensors"
        file.write_bytes(content)
        with pytest.raises(FileFormatError) as error:
            load(file)
        one_line(error, file)
    assert not (tmp_path / "trapped").exists()


@bad_input
def test_foreign_safetensors(tmp_path):
    file = tmp_path / "foreign.safetensors"
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"weight": torch.ones(2)}, file, metadata)
        with pytest.raises(FileFormatError, match="not a transformer saved by measureflow") as error:
            load(file)
        one_line(error, file)


def altered(file: Path, change, parts: dict[str, torch.Tensor] | None = None) -> Path:
    """The file of a transformer whose header and tensors have been changed."""
    save(random_transformer(), file)
    with safetensors.safe_open(file, framework="pt") as whole:
        header = json.loads(whole.metadata()["measureflow"])
        kept = {name: whole.get_tensor(name) for name in whole.keys()}  # noqa: SIM118
    change(header)
    kept = {name: tensor for name, tensor in (kept | (parts or {})).items() if tensor is not None}
    safetensors.torch.save_file(kept, file, {"measureflow": json.dumps(header)})
    return file


@bad_input
@pytest.mark.parametrize(
    ("change", "parts", "message"),
    [
        (lambda h: h.update(format=2), {}, "expected format 1, got 2; install a newer measureflow"),
        (lambda h: h.update(format="x"), {}, "expected format 1, got 'x'; save it again"),
        (lambda h: h.pop("format"), {}, "the header cannot be read"),
        (lambda h: h.pop("layers"), {}, "the header: 'layers' is missing"),
        (lambda h: h.update(layers=[]), {}, "the header: layers: expected at least one, got none"),
        (lambda h: h.update(layers=3), {}, "the header: "),
        (lambda h: h.update(shared=[]), {}, "layer 0: "),
        (lambda h: h.update(metadata=3), {}, "the header: metadata: expected a mapping, got 3"),
        (lambda h: h["layers"][1].update(duration=-1), {}, "layer 1: duration: expected a positive number, got -1"),
        (lambda h: h["layers"][1].update(duration="long"), {}, "layer 1: "),
        (lambda h: h["layers"].append({"repeats": 3}), {}, "layer 3: repeats: expected an earlier layer, got 3"),
        (lambda h: h["layers"].append({"repeats": "a"}), {}, "layer 3: repeats: expected an earlier layer, got 'a'"),
        (lambda h: h["layers"][1].update(stage=7), {}, "layer 1: stage: expected text, got 7"),
        (lambda h: h["layers"][0]["heads"][0]["kernel"].update(name="x"), {}, "layer 0: 'x' is missing or unknown"),
        (lambda h: h["layers"][0]["heads"][0]["kernel"].update(slope=1), {}, "layer 0: .*slope"),
        (lambda h: h["layers"][1]["perceptron"].update(activation="x"), {}, "layer 1: activation: expected one of"),
        (
            lambda h: None,
            {"layers.1.perceptron.b": torch.ones(4).double()},
            r"layer 1: b: expected shape \(m=5\), got \(4,\)",
        ),
        (lambda h: None, {"layers.1.perceptron.b": None}, "the tensor 'layers.1.perceptron.b' is missing"),
        (
            lambda h: None,
            {"layers.1.perceptron.b": torch.ones(5).int()},
            "b: expected floating-point numbers, got torch.int32",
        ),
        (
            lambda h: None,
            {"layers.9.perceptron.b": torch.ones(4)},
            "the tensor 'layers.9.perceptron.b' belongs to no layer",
        ),
    ],
)
def test_headers_and_tensors_that_do_not_fit(tmp_path, change, parts, message):
    file = altered(tmp_path / "theta.safetensors", change, parts)
    with pytest.raises(FileFormatError, match=message) as error:
        load(file)
    one_line(error, file)


@bad_input
@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_headers_that_are_no_json_object(tmp_path, text):
    file = tmp_path / "theta.safetensors"
    safetensors.torch.save_file({"a": torch.ones(1)}, file, {"measureflow": text})
    with pytest.raises(FileFormatError, match="header cannot be read") as error:
        load(file)
    one_line(error, file)


@bad_input
def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x.safetensors: there is no such file"):
        load(tmp_path / "x.safetensors")
    with pytest.raises(IsADirectoryError, match="expected a saved transformer, got a folder"):
        load(tmp_path)
