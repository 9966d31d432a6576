"""Files from someone else, read by everything that reads files: each reader under each attack.

Whatever is in a file, a reader ends in one error that names the file, in bounded time, and leaves models and folders
as they were; or it returns what it would have returned without the attack. Where no digest covers a file, other
numbers and other names of the same kind are another file that is as good.
"""

import contextlib
import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tiers
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import bits, folder
from torch import nn
from valid_calls import recording

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import manifest

HUGE = 1 << 40


class LateError(BaseException):
    """Raised where a reader waits: nothing catches it."""


class Reader(NamedTuple):
    """What reads a file.

    Attributes:
        write: Writes a good folder.
        file: The file of it that is attacked.
        read: Reads the folder, and returns what can be compared; or raises.
        error: What it raises.
        sealed: Whether a digest covers all of the file.
        step: Of how many bytes one is attacked; the long tier attacks eight times as many, and all of their bits.
        header: Returns how many bytes at the beginning say what the others are; those others are values.
    """

    write: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    error: type[Exception] = ValueError
    sealed: bool = True
    step: int = 1
    header: Callable[[bytes], int] = len


def net(seed=0):
    torch.manual_seed(seed)
    return ht.quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "fp8_rowwise", persistent=True)


def state_of(seed=0):
    torch.manual_seed(seed)
    return {"model": ht.quantize_(nn.Sequential(nn.Linear(4, 4)), "fp8"), "seen": {"epoch": seed}}


@contextlib.contextmanager
def unchanged(model):
    """Check that a model is as it was, if something is raised."""
    before = bits(model)
    try:
        yield
    except BaseException:
        assert bits(model) == before
        raise


def load_step(path):
    state = state_of(1)
    with unchanged(state["model"]):
        try:
            checkpoint.load(path.parent, state)
        finally:
            seen = state["seen"]
    return bits(state["model"]), seen


def read_metadata(path):
    metadata = checkpoint.SafeReader(path).read_metadata()
    metadata.storage_meta = None  # names where it was written
    return metadata


def read_data(path):
    """Read all entries of a checkpoint of torch, as far as ``dcp.load`` goes before it writes."""
    reader, planner = checkpoint.SafeReader(path), checkpoint.HybridLoadPlanner()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner.set_up_planner({"a": torch.zeros(4), "b": 0}, metadata)
    reader.stage(reader.prepare_local_plan(planner.create_local_plan()), planner)


def load_folder(path, make=net):
    model = make(1)
    with unchanged(model):
        ht.load_pretrained(model, path)
    return bits(model)


def load_exported(path):
    return {name: bits(nn.ParameterDict({"t": t}))["t.0"] for name, t in ht.load_safetensors(path / "run").items()}


def write_folder(path, *, sealed=True, **options):
    ht.export_pretrained(net(), path, dtype=torch.float32, **options)
    if not sealed:
        (path / "digests.json").unlink()


class Stack(nn.Module):
    """Experts as gpt-oss stores them."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.num_experts, self.is_transposed = 2, True
        self.w1 = nn.Parameter(torch.randn(2, 32, 32).bfloat16())


def write_experts(path):
    ht.export_pretrained(ht.quantize_(Stack(0), "mxfp4"), path, "hf_mxfp4")
    (path / "digests.json").unlink()


def write_recording(path):
    path.mkdir()
    recording().save(path / "run.json")


def read_recording(path):
    page = path.with_suffix(".html")
    page.unlink(missing_ok=True)
    try:
        return ht.report(path / "run.json", page).read_text()
    except BaseException:
        assert not page.exists()
        raise


def header_of(data):
    return 8 + int.from_bytes(data[:8], "little")


INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00002.safetensors"
WHOLE = "model.safetensors"
save_step = {
    "write": lambda path: checkpoint.save(path.parent, 1, state_of()),
    "read": load_step,
    "error": RuntimeError,
}
save_plain = {"write": lambda path: dcp.save({"a": torch.ones(4), "b": 3}, checkpoint_id=path), "sealed": False}
READERS = {
    **{f"step {n}": Reader(file=n, step=97, **save_step) for n in ("manifest.json", ".metadata", "__0_0.distcp")},
    "manifest": Reader(save_step["write"], "manifest.json", manifest.Manifest.read, step=3),
    "metadata": Reader(file=".metadata", read=read_metadata, step=3, **save_plain),
    "data": Reader(file="__0_0.distcp", read=read_data, step=13, **save_plain),
    "safetensors": Reader(
        lambda path: write_folder(path, sealed=False, shard_bytes=50), SHARD, load_folder, step=2, header=header_of
    ),
    "experts": Reader(write_experts, WHOLE, lambda path: load_folder(path, Stack), step=2, header=header_of),
    "index": Reader(lambda path: write_folder(path, sealed=False, shard_bytes=50), INDEX, load_folder, step=5),
    **{
        f"sealed {name}": Reader(lambda path: write_folder(path, shard_bytes=50), name, load_folder, step=23)
        for name in ("digests.json", "config.json", INDEX, SHARD)
    },
    "exported": Reader(
        lambda path: path.mkdir() or ht.export_safetensors(net(), path / "run", "quantized"),
        "run", load_exported, step=3, header=header_of,
    ),
    "recording": Reader(write_recording, "run.json", read_recording, sealed=False, step=3),
}  # fmt: skip
JSON = [b"", b"[]", b"3", b"null", b"\xff", b'"\xed\xa0\x80"', b"{", b"{}", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 5000]


def every(reader):
    return -(-reader.step // 8) if tiers.LONG else reader.step


def flipped(good, reader):
    """Yield a file with one bit flipped, for every byte that is attacked."""
    for at in range(0, reader.header(good), every(reader)):
        for bit in range(8) if tiers.LONG else [at % 8]:
            yield good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]


def cut(good, reader):
    for length in range(0, len(good), every(reader)):
        yield good[:length]


def other_json(good, reader):
    """Yield other text: in place of all that is JSON, and with numbers of any size."""
    text, rest = good, b""
    if reader.header is header_of:
        text, rest = good[8 : header_of(good)], good[header_of(good) :]
    found = [*JSON]
    with contextlib.suppress(ValueError):
        known = json.loads(text)
        for name in known:
            wrong = [-1, 1e999, "../a\0", [[]], {"a": {}}, *[None] * (name != "__metadata__")]  # which files may lack
            found += [json.dumps(known | {name: one}).encode() for one in wrong]
            found += [json.dumps(known | {name: HUGE}).encode().replace(b"%d" % HUGE, b"9" * 5000)]
    for one in found:
        yield (len(one).to_bytes(8, "little") + one + rest) if rest else one


def twice(good, reader):
    """Yield text with a name twice: what reads the first of them sees something else than what reads the last."""
    for name, value in json.loads(good).items() if reader.file.endswith(".json") else ():
        one = json.dumps({name: value})[1:-1].encode()
        yield good.replace(b"{", b"{" + one + b",", 1)


def sizes(good, reader):
    """Yield files that declare other sizes than they have."""
    for number in (0, 1, 1 << 31, HUGE, 1 << 63, (1 << 64) - 1):
        yield number.to_bytes(8, "little") + good[8:]
    if reader.header is not header_of:
        return
    known = json.loads(good[8 : header_of(good)])
    for name in known.keys() - {"__metadata__"}:
        start, end = known[name]["data_offsets"]
        others = [{"data_offsets": [a, b]} for a, b in ((0, HUGE), (end, start), (start + 1, end + 1), (-1, end))]
        others += [{"shape": shape} for shape in ([HUGE], [0, HUGE], [1 << 32, 1 << 32], [-1], [1] * 10**4, 3)]
        for other in others:
            text = json.dumps(known | {name: known[name] | other}).encode()
            yield len(text).to_bytes(8, "little") + text + good[header_of(good) :]


def swapped(name, good, folders):
    """Yield what the other readers read."""
    for other, path in folders.items():
        content = (path / READERS[other].file).read_bytes()
        # what exports write is what load_safetensors reads
        if content != good and not (name == "exported" and READERS[other].file in (SHARD, WHOLE)):
            yield content


BYTES = {"flipped": flipped, "cut": cut, "json": other_json, "twice": twice, "sizes": sizes}


def pipe(path, _):
    os.mkfifo(path)


def link_to(target):
    return lambda path, moved: path.symlink_to(target or moved)


def sparse(path, moved):
    shutil.copyfile(moved, path)
    os.truncate(path, HUGE)


FILES = {
    "pipe": pipe, "device": link_to("/dev/zero"), "link": link_to(None), "nowhere": link_to("nothing"),
    "circle": lambda path, _: path.symlink_to(path.name), "folder": lambda path, _: path.mkdir(), "sparse": sparse,
}  # fmt: skip
NAMED = {"exported", "recording"}  # the file itself is named by the caller, who may name a link to it


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What each reader reads when nobody attacks it."""
    found = {}
    for reader in READERS.values():
        if reader.write not in found:
            found[reader.write] = folder(tmp_path_factory.mktemp("good"), 1)
            with warnings.catch_warnings(action="ignore"):  # torch's, that there is no process group
                reader.write(found[reader.write])
    return {name: found[reader.write] for name, reader in READERS.items()}


@pytest.fixture(autouse=True)
def _nobody_waits():
    """Raise in a reader that waits, or reads for ever: a test of it would never end."""

    def late(*_):
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def attack(request, folders, tmp_path):
    """Return what reads a copy of the reader's folder, once its file was replaced."""
    name = request.getfixturevalue("name")
    reader, path = READERS[name], folder(tmp_path, 1)
    shutil.copytree(folders[name], path)
    expected = reader.read(path)
    assert reader.read(path) == expected  # and another copy of it is equal

    def run():
        listed = {p.name: p.lstat().st_mtime_ns for p in path.iterdir()}
        told = None
        signal.setitimer(signal.ITIMER_REAL, 20)
        try:
            found = reader.read(path)
        except reader.error as error:
            told = str(error)
        if told is None:
            assert found == expected if reader.sealed else type(found) is type(expected)
        else:
            assert reader.file in told, told
        assert {p.name: p.lstat().st_mtime_ns for p in path.iterdir()} == listed
        return told is not None

    return run, path / reader.file


@pytest.mark.parametrize("kind", [*BYTES, "swapped"])
@pytest.mark.parametrize("name", READERS)
def test_other_bytes(name, kind, attack, folders):
    run, file = attack
    good = file.read_bytes()
    others = swapped(name, good, folders) if kind == "swapped" else BYTES[kind](good, READERS[name])
    refused = []
    for content in others:
        file.write_bytes(content)
        refused.append(run())
    assert all(refused) if kind == "twice" else sum(refused) > len(refused) / 4


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", READERS)
def test_other_files(name, kind, attack, tmp_path):
    """Anything but a regular file of the folder hangs who opens it, has no end, or is read from elsewhere."""
    run, file = attack
    file.rename(tmp_path / "moved")
    FILES[kind](file, tmp_path / "moved")
    assert run() or (kind == "link" and name in NAMED) or (kind == "sparse" and not READERS[name].sealed)
