"""Folders from someone else: nothing in them runs, changes the process, or is read from elsewhere."""

import io
import json
import os
import pickle
import pickletools
import re
import sys
import time
import tracemalloc
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import bits, folder, forge, load, make, saved
from torch.distributed.checkpoint.metadata import MetadataIndex

from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import items, manifest
from hybridtensor.untrusted import metadata as reading


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hacked",)


class TestHostile:
    def test_what_is_no_metadata_is_refused(self, tmp_path):
        saved(tmp_path, 1)
        forge(folder(tmp_path, 1), ".metadata", pickle.dumps({"state_dict_metadata": {}}))
        assert "it holds no metadata but dict" in checkpoint.verify(tmp_path)[1][0]

    @pytest.mark.parametrize("where", ["whole", "inside"])
    def test_metadata_runs_nothing(self, where, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        saved(tmp_path, 1)
        path = folder(tmp_path, 1)
        metadata = checkpoint.SafeReader(path).read_metadata()
        metadata.planner_data = {"a": Hostile()}
        forge(path, ".metadata", pickle.dumps(Hostile() if where == "whole" else metadata))
        assert "a pickle that asks for posix.system" in checkpoint.verify(tmp_path)[1][0]
        with pytest.raises(RuntimeError, match="do not use this checkpoint"):
            load(tmp_path)
        state = {"model": make("fp8")[0].state_dict()}
        told = "do not use this checkpoint|metadata is None"  # torch 2.11 drops the reader's reason
        with warnings.catch_warnings(action="ignore"), pytest.raises(BaseException, match=told):
            dcp.load(state, storage_reader=checkpoint.SafeReader(path))
        assert not (tmp_path / "hacked").exists()

    def test_values_run_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"seen": Hostile()}, checkpoint_id=tmp_path / "plain")
        with pytest.raises(BaseException, match="Weights only load failed"), warnings.catch_warnings(action="ignore"):
            dcp.load({"seen": 0}, checkpoint_id=tmp_path / "plain", planner=checkpoint.HybridLoadPlanner())
        assert not (tmp_path / "hacked").exists()

    def test_files_elsewhere_are_not_read(self, tmp_path):
        saved(tmp_path, 1)
        path = folder(tmp_path, 1)
        metadata = checkpoint.SafeReader(path).read_metadata()
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"
        forge(path, ".metadata", pickle.dumps(metadata))
        assert "it points to '../secret', which is no file" in checkpoint.verify(tmp_path)[1][0]

    @pytest.mark.parametrize(
        "thing", [torch.nn.Linear, os.getcwd, eval, torch.load, pickle.loads], ids=lambda thing: thing.__name__
    )
    def test_only_records_are_admitted(self, thing, tmp_path):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(ValueError, match="a pickle that asks for"):
            checkpoint.SafeReader(tmp_path).read_metadata()


class State:
    """Pickles as an object of a class with a state that has two parts, the second for slots."""

    def __init__(self, name, *states):
        self.module, _, self.name = name.rpartition(".")
        self.states = states

    def pickled(self):
        found = b"\x80\x04c" + f"{self.module}\n{self.name}\n".encode()
        for state in self.states:
            found += pickle.dumps(state, protocol=2)[2:-1] + b"b"
        return found + b"."


DCP = "torch.distributed.checkpoint"


class TestPickles:
    """The metadata is a pickle, which could do anything if it were read as one."""

    def refused(self, tmp_path, data):
        (tmp_path / ".metadata").write_bytes(data)
        started = time.monotonic()
        with pytest.raises(ValueError, match=r"\.metadata: ") as raised:
            checkpoint.SafeReader(tmp_path).read_metadata()
        assert time.monotonic() - started < 5
        return str(raised.value)

    @pytest.mark.parametrize(
        "name",
        [
            f"{DCP}.metadata.Metadata", f"{DCP}.metadata.MetadataIndex", f"{DCP}.filesystem._StorageInfo",
            f"{DCP}.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout", "torch.Size", "torch.float32",
            "pathlib.PosixPath",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("state", [(None, {"__init__": 3}), {"__init__": 3}, (None, {"__code__": 3})], ids=str)
    def test_no_class_or_function_is_changed(self, name, state, tmp_path):
        module, _, last = name.rpartition(".")
        thing = getattr(sys.modules[module], last)
        before = {key: getattr(thing, key) for key in dir(thing) if key in ("__init__", "__code__", "__dict__")}
        self.refused(tmp_path, State(name, state).pickled())
        after = {key: getattr(thing, key) for key in before}
        assert all(before[key] == after[key] for key in before)

    def test_records_get_their_own_fields_once(self, tmp_path):
        record = b"\x80\x04c" + f"{DCP}.metadata\nStorageMeta\n".encode() + b")\x81"
        fields = {
            "own": b"}(\x8c\x07save_idNub",
            "other": b"}(\x8c\x08__init__Nub",
            "slots": b"N}(\x8c\x07save_idNu\x86b",
        }
        assert "no metadata but StorageMeta" in self.refused(tmp_path, record + fields["own"] + b".")
        assert "fields by name" in self.refused(tmp_path, record + fields["slots"] + b".")
        assert "built once" in self.refused(tmp_path, record + fields["own"] * 2 + b".")
        assert "no REDUCE of" in self.refused(tmp_path, record[:-2] + b")R.")
        assert "without arguments" in self.refused(tmp_path, record[:-2] + b"N\x85\x81.")
        # Within metadata, whose fields are looked at
        metadata = b"\x80\x04c" + f"{DCP}.metadata\nMetadata\n".encode() + b")\x81}("
        metadata += b"\x8c\x13state_dict_metadata}\x8c\x0cstorage_data}"
        for end, told in (
            (b"ub.", None),
            (b"\x8c\x08__init__Nub.", "Metadata with its own fields"),
            (b"\x8c\x0cstorage_meta" + record[2:] + fields["other"] + b"ub.", "StorageMeta with its own fields"),
            (b"\x8c\x0cstorage_meta" + record[2:] + b"ub.", "StorageMeta with its fields"),
            (b"\x8c\x07versionK\x01ub.", "the version of"),
        ):
            (tmp_path / ".metadata").write_bytes(metadata + end)
            if told is None:
                assert checkpoint.SafeReader(tmp_path).read_metadata().storage_data == {}
            else:
                assert told in self.refused(tmp_path, metadata + end)

    @pytest.mark.parametrize(
        ("bomb", "told"),
        [
            (b"\x80\x04Nr\xff\xff\xff\xff.", "memos in their order"),
            (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "expected 1099511627776 bytes"),
            (b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".", "expected 1099511627776 bytes"),
            (b"\x80\x04X\xff\xff\xff\xffab.", "expected 4294967295 bytes"),
            (b"\x80\x04" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".", "100 levels at most"),
            (b"\x80\x04" + b"(" * 10**5 + b".", "it has no end"),
            (b"\x80\x04)" + b"\x94h\x00\x86" * 99 + b".", "no metadata but tuple"),
            (b"\x80\x04}(\x8c\x01a\x94" + b"2\x86\x94" * 99 + b"Nu.", "opcode DUP"),
            (b"\x80\x04}(\x8c\x01a\x94" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(1, 99)) + b"Nu.", "parts"),
            (b"\x80\x04}(" + b"".join(b"\x8a\x09%c" % n + b"\0" * 7 + b"\1N" for n in range(99)) + b"u.", "numbers"),
            (b"\x80\x04(N" + b"".join(b"q%c]h%cah%ca" % (n, n, n) for n in range(99)) + b"t.", "parts at most"),
            (b"\x80\x04]\x94h\0a.", "no part of itself"),
            (b"\x80\x04N.N.", "more behind it"),
            (b"", "exhausted"),
            (b"\x80\x04.", "it has no end"),
            (b"\x80\x04\x95" + b"\xff" * 7 + b"\x7fN.", "frames of whole opcodes"),
            (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "frames of whole opcodes"),
            (b"\x80\x04" + b"\x95\x0b" + b"\0" * 7 + b"\x95\2" + b"\0" * 7 + b"N.", "opcode FRAME"),
            (b"\x80\x04N\x80\x04.", "opcode PROTO"),
            (b"\x80\x040.", "opcode POP"),
            (b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".", "numbers below"),
        ],
        ids=range(21),
    )  # fmt: skip
    def test_bombs_are_refused_at_once(self, bomb, told, tmp_path):
        tracemalloc.start()
        text = self.refused(tmp_path, bomb)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert re.search(told, text), text
        assert peak < 400 * len(bomb) + (1 << 20)

    @pytest.mark.parametrize("field", ["fqn", "offset", "index"])
    def test_keys_do_not_collide(self, field, tmp_path):
        """Numbers that are equal modulo 2 ** 61 - 1 have one hash, by which a dictionary takes for ever."""
        saved(tmp_path, 1)
        path = folder(tmp_path, 1)
        metadata = checkpoint.SafeReader(path).read_metadata()
        info = next(iter(metadata.storage_data.values()))
        for number in (i * (2**61 - 1) for i in range(1, 200)):
            value = torch.Size([number % 2**63]) if field == "offset" else number
            key = MetadataIndex(**{"fqn": "a", field: value})
            metadata.storage_data[key] = info
        (tmp_path / "other").mkdir()
        assert "numbers below 2 ** 60" in self.refused(tmp_path / "other", pickle.dumps(metadata))

    def test_metadata_that_is_not_of_its_types_is_refused(self, tmp_path):
        saved(tmp_path, 1)
        path = folder(tmp_path, 1)

        def told(change):
            metadata = checkpoint.SafeReader(path).read_metadata()
            change(metadata, metadata.state_dict_metadata["model.0.weight"])
            (tmp_path / "other").mkdir(exist_ok=True)
            return self.refused(tmp_path / "other", pickle.dumps(metadata))

        def first(metadata):
            return next(iter(metadata.storage_data.values()))

        def shared(metadata, entry):
            metadata.state_dict_metadata["model.2.weight"].chunks = entry.chunks

        changes = {
            "the storage_data of": lambda m, e: setattr(m, "storage_data", [1]),
            "names in a path": lambda m, e: m.planner_data.update({"a": (1.5,)}),
            "a path by name": lambda m, e: m.planner_data.update({"a": "abc"}),
            "entries by name|keys that are names": lambda m, e: m.state_dict_metadata.update({3: e}),
            "the size of": lambda m, e: setattr(e, "size", (64, 32)),
            "chunks of the whole of": lambda m, e: setattr(e, "size", torch.Size([1 << 20, 32])),
            "chunks inside of": lambda m, e: setattr(e, "size", torch.Size([8, 32])),
            "the properties of": lambda m, e: setattr(e, "properties", None),
            "all bytes of": lambda m, e: setattr(e.properties, "dtype", torch.complex128),
            "a place of": lambda m, e: m.state_dict_metadata.update(a=m.state_dict_metadata["optimizer.values"]),
            "alone": shared,
            "the relative_path of": lambda m, e: setattr(first(m), "relative_path", 3),
            "a place in a file": lambda m, e: setattr(first(m), "offset", -1),
            "transformed": lambda m, e: setattr(first(m), "transform_descriptors", ("zstd",)),
        }  # fmt: skip
        for text, change in changes.items():
            assert re.search(text, told(change)), text

    def test_places_behind_the_end_of_a_file_are_refused(self, tmp_path):
        saved(tmp_path, 1)
        metadata = checkpoint.SafeReader(folder(tmp_path, 1)).read_metadata()
        next(iter(metadata.storage_data.values())).offset = 1 << 40
        forge(folder(tmp_path, 1), ".metadata", pickle.dumps(metadata))
        assert "points behind the end of __0_0.distcp" in checkpoint.verify(tmp_path)[1][0]


def test_a_step_that_is_a_link_is_skipped(tmp_path):
    saved(tmp_path / "elsewhere", 1, 2)
    expected = saved(tmp_path / "run", 1)
    folder(tmp_path / "run", 2).symlink_to(folder(tmp_path / "elsewhere", 2))
    assert "step_00000002 is no folder but a link" in checkpoint.verify(tmp_path / "run")[2][0]
    with pytest.warns(UserWarning, match="is no folder but a link"):
        assert load(tmp_path / "run") == (1, expected[1])


def test_a_manifest_with_fields_of_other_types_is_damaged(tmp_path):
    """Whatever its digest says: who writes it can compute that."""
    saved(tmp_path, 1)
    path = folder(tmp_path, 1) / "manifest.json"
    good = json.loads(path.read_text())
    for name in good.keys() - {"digest", "format", "fingerprint"}:
        for value in (None, "x", [1], {"a": 1}, -1, {"a": {"kind": 1, "fingerprint": "x"}}, {"a": [-1, "x"]}, True):
            content = {key: good[key] for key in good if key != "digest"} | {name: value}
            content["digest"] = manifest._digest(content)
            path.write_text(json.dumps(content))
            told = checkpoint.verify(tmp_path)[1][0]
            assert f"damaged manifest: {name} is not what it should be made of" in told, (name, value)


def archive(value, change):
    """Return what is saved of a value with its pickle changed, or packed otherwise."""
    stream, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(packed, "w") as target:
        for record in source.infolist():
            change(target, record.filename, source.read(record))
    return packed.getvalue()


def repickled(data):
    def change(target, name, content):
        target.writestr(name, data(content) if name.endswith("data.pkl") else content)

    return change


class TestUnpickler:
    """Python's, with a list of our own: what it does without, and after, the look that pickles get."""

    @pytest.mark.parametrize(
        "forged",
        [
            b"cos\nsystem\n.", b"ctorch\nTensor\n.", b"cbuiltins\ngetattr\n.", b"ctorch.nn\nSize\n.",
            b"\x8c\x05torch\x8c\x06Tensor\x93.", b"\x8c\x05torch\x8c\x0cSize.__new__\x93.",
            b"c__builtin__\nset\n.", b"cpickle\nUnpickler\n.", b"NQ.", b"P1\n.", b"\x82\x01.",
        ],
        ids=str,
    )  # fmt: skip
    def test_it_refuses_by_itself(self, forged):
        with pytest.raises((ValueError, pickle.UnpicklingError), match=r"not on the list|persistent|extension"):
            reading._Unpickler(io.BytesIO(b"\x80\x04" + forged)).load()

    def test_lists_of_others_are_neither_used_nor_changed(self, tmp_path):
        saved(tmp_path, 1)
        with torch.serialization.safe_globals([Hostile, (Hostile, "torch.Size")]):
            assert not checkpoint.verify(tmp_path)[1]
            forge(folder(tmp_path, 1), ".metadata", b"\x80\x02c" + f"{__name__}\nHostile\n.".encode())
            assert "a pickle that asks for" in checkpoint.verify(tmp_path)[1][0]

    def test_frames_hide_nothing(self, tmp_path):
        """Where one ends within an opcode, Python's unpickler skips the rest of the opcode."""
        hidden = b"\0\0c" + f"{DCP}.metadata\nMetadata\n".encode() + b"(N}X\5\0\0\0ownedK\x01stb0."
        text = b"X" + len(hidden).to_bytes(2, "little") + b"\0\0" + hidden
        data = b"\x80\x04\x95" + (4).to_bytes(8, "little") + b"]" + text + b"a."
        assert [op.name for op, _, _ in pickletools.genops(data)][2:] == ["EMPTY_LIST", "BINUNICODE", "APPEND", "STOP"]
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(ValueError, match="frames of whole opcodes"):
            checkpoint.SafeReader(tmp_path).read_metadata()
        assert not hasattr(dcp.metadata.Metadata, "owned")

    @pytest.mark.parametrize(
        ("forged", "told"),
        [
            # The one member of an enumeration that all of the process has
            (f"c{DCP}.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R}}\x8c\x07_value_K\x05sb.", "no BUILD of REDUCE"),
            ("cpathlib\nPosixPath\n\x8c\x01a\x85R}\x8c\x04_strK\x05sb.", "no BUILD of REDUCE"),
            # Fields that are called as methods
            (f"c{DCP}.metadata\nStorageMeta\n)\x81}}\x8c\x06appendctorch\nSize\nsb)a.", "no APPEND of BUILD"),
            (f"c{DCP}.metadata\nStorageMeta\n)\x81}}\x8c\x06extendctorch\nSize\nsb(Ne.", "no APPENDS of BUILD"),
            (f"c{DCP}.metadata\nStorageMeta\n)\x81\x8c\x01aNs.", "no SETITEM of NEWOBJ"),
            ("ctorch\nSize\n)R(\x8c\x01aNu.", "no SETITEMS of REDUCE"),
        ],
        ids=range(6),
    )
    def test_only_lists_dictionaries_and_records_are_added_to(self, forged, told, tmp_path):
        (tmp_path / ".metadata").write_bytes(b"\x80\x04" + forged.encode("latin1"))
        with pytest.raises(ValueError, match=told):
            checkpoint.SafeReader(tmp_path).read_metadata()
        assert dcp.metadata._MEM_FORMAT_ENCODING(0).value == 0

    @pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
    def test_all_protocols_are_read(self, protocol, tmp_path):
        saved(tmp_path, 1)
        metadata = checkpoint.SafeReader(folder(tmp_path, 1)).read_metadata()
        metadata.planner_data |= {"a" * 70_000: ("a",), "\ud800\n": ("b", 300, 70_000)}  # of more than a frame
        pickled = pickle.dumps(metadata, protocol)
        for data in (pickled, pickletools.optimize(pickled), pickle._dumps(metadata, protocol)):
            (tmp_path / ".metadata").write_bytes(data)
            found = checkpoint.SafeReader(tmp_path).read_metadata()
            found.storage_meta = metadata.storage_meta
            assert found == metadata

    @pytest.mark.parametrize("name", ["_StorageInfo", "_MemoryFormat"])
    def test_records_that_torch_lacks_are_told_of(self, name, tmp_path, monkeypatch):
        saved(tmp_path, 1)
        monkeypatch.setattr(reading, name, object)
        with pytest.raises(NotImplementedError, match=r"lacks _StorageInfo or") as raised:
            checkpoint.SafeReader(folder(tmp_path, 1)).read_metadata()
        assert f"torch 2.11 to 2.13 is required to read metadata, torch {torch.__version__}" in str(raised.value)


class TestItems:
    """What torch unpacks of a data file is looked at first."""

    def refused(self, data, told):
        for read in (items.read_value, items.read_tensor):
            with pytest.raises(ValueError, match=told):
                read(io.BytesIO(data))

    def test_memory_is_no_more_than_the_file(self):
        huge = (1 << 40).to_bytes(6, "little")
        larger = repickled(lambda data: data.replace(b"K\x05tq", b"\x8a\x06" + huge + b"tq"))
        self.refused(archive(torch.zeros(5), larger), "a tensor in its own memory is required")
        deflated = archive(torch.zeros(5), lambda target, *item: target.writestr(*item, zipfile.ZIP_DEFLATED))
        self.refused(deflated, "an archive of plain files")
        with warnings.catch_warnings(action="ignore"):
            twice = archive(3, lambda target, *item: [target.writestr(*item) for _ in range(2)])
        self.refused(twice, "an archive of plain files")
        self.refused(pickle.dumps(3, protocol=2), "a damaged archive")
        self.refused(b"", "a damaged archive")

    def test_values_end(self):
        laughs = b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60)) + b"."
        self.refused(archive(0, repickled(lambda _: laughs)), "parts at most are read")
        deep = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
        self.refused(archive(0, repickled(lambda _: deep)), "a value of 100 levels at most is required")
        itself = b"\x80\x02]q\x01h\x01a."
        self.refused(archive(0, repickled(lambda _: itself)), "no part of itself")

    @pytest.mark.parametrize(
        "forged",
        [
            b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(X\x02\x00\x00\x00O8tR\x8a\x01\x05tR.",
            b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(X\x02\x00\x00\x00f8tRNtR.",
            b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85K\x01tR.",
            b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85K\x01tR"
            b"(K\x01J\xff\xff\xff\x7f\x85cnumpy\ndtype\n(X\x02\x00\x00\x00f8tRK\x00cbuiltins\nbytes\n)Rtb.",
            b"cnumpy\nndarray\n.",
            b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        ],
        ids=["object", "no bytes", "no values", "huge", "class", "bytes"],
    )
    def test_numpy_runs_nothing_of_its_own(self, forged):
        self.refused(archive(0, repickled(lambda _: b"\x80\x02" + forged)), "numpy|required|GLOBAL")

    @pytest.mark.parametrize("alone", [False, True])
    def test_a_step_with_an_entry_that_cannot_be_read_is_skipped(self, alone, tmp_path):
        model, _ = make("fp8")
        state = {"model": model, "a": torch.zeros(4, dtype=torch.int32), "b": torch.zeros(4), "c": [1]}
        for step in (2,) if alone else (1, 2):
            checkpoint.save(tmp_path, step, state)
        path = folder(tmp_path, 2)
        metadata = checkpoint.SafeReader(path).read_metadata()
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        places["a"].offset, places["b"].offset = places["b"].offset, places["a"].offset
        forge(path, ".metadata", pickle.dumps(metadata))
        told = r"__0_0.distcp: [ab] cannot be read: a tensor of another dtype"
        verified = checkpoint.verify(tmp_path)
        assert re.search(told, verified.pop(2)[0])
        assert not any(verified.values())
        before = bits(model)
        if alone:
            with pytest.raises(RuntimeError, match=rf"no intact checkpoint.*{told}"):
                checkpoint.load(tmp_path, state)
        else:
            with pytest.warns(UserWarning, match=rf"{told}.*; loading step 1"):
                assert checkpoint.load(tmp_path, state) == 1
        assert bits(model) == before

    def test_a_step_with_a_value_that_runs_code_is_skipped(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        model, _ = make("fp8")
        for step in (1, 2):
            checkpoint.save(tmp_path, step, {"model": model, "seen": {"epoch": step}})
        path = folder(tmp_path, 2)
        metadata = checkpoint.SafeReader(path).read_metadata()
        place = next(info for index, info in metadata.storage_data.items() if index.fqn.startswith("seen"))
        content = (path / place.relative_path).read_bytes()
        forged = archive(0, repickled(lambda _: pickle.dumps(Hostile(), protocol=2)))
        place.offset, place.length = len(content), len(forged)
        forge(path, place.relative_path, content + forged)
        forge(path, ".metadata", pickle.dumps(metadata))
        state = {"model": model, "seen": {"epoch": 0}}
        with pytest.warns(UserWarning, match=r"seen.* cannot be read: .*; loading step 1"):
            assert checkpoint.load(tmp_path, state) == 1
        assert state["seen"] == {"epoch": 1}
        assert "cannot be read" in checkpoint.verify(tmp_path)[2][0]
        assert not (tmp_path / "hacked").exists()
