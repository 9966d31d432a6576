"""A model that is loaded whole or is as it was, and where the files may be.

Oracle: the bytes of parameters, buffers and the state of quantizers before.
"""

import contextlib
import itertools
import json
import os
import types

import pytest
import safetensors
import torch
from experts import EXPERTS, HIDDEN, WIDTH, Experts
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hybridtensor as ht
from hybridtensor.subclasses.structure import flatten
from hybridtensor.untrusted.safetensors_folder import Folder

KINDS = ["plain", "master", "persistent"]
SPECS = ["fp8", "fp8_delayed", "mxfp8", "nvfp4"]


def model(kind="persistent", spec="fp8", seed=0, last=64):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, last))
    return made if kind == "plain" else ht.quantize_(made, spec, persistent=kind == "persistent")


def bits(net):
    """Return copies of all bytes that a model has, of values in high precision and the state of quantizers too."""
    found = {}
    for name, value in (*net.named_parameters(), *net.named_buffers()):
        tensors = flatten(value.detach())[0]
        if isinstance(value, ht.HybridTensor) and value.high_precision.current is not None:
            follows = torch.tensor([value.high_precision.follows, value.high_precision.loaded])
            tensors = [*tensors, value.high_precision.current, follows]
        found[name] = [t.clone().contiguous().view(-1).view(torch.uint8) for t in tensors]
    for name, module in net.named_modules():
        if getattr(module, "amax", None) is not None:
            found[f"{name}.amax"] = [module.amax.clone()]
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert all(torch.equal(a, b) for a, b in zip(one[name], other[name], strict=True)), name


def fail_at(monkeypatch, number):
    """Have the ``number``-th write into a plain tensor raise, and no other; return how many there were."""
    seen, original = [], Tensor.copy_

    def failing(self, *args, **kwargs):
        seen.append(tuple(self.shape))
        if len(seen) == number:
            raise OSError("the device is gone")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", failing)
    return seen


class TestNothingIsWritten:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("spec", SPECS)
    def test_where_the_last_weight_has_another_shape(self, kind, spec, tmp_path):
        folder = ht.export_pretrained(model(kind, spec, seed=1), tmp_path / "out", dtype=torch.float32)
        net = model(kind, spec, last=32)
        before = bits(net)
        with pytest.raises(ValueError, match=r"3\.weight of \[32, 64\] is required, got \[64, 64\] in the folder"):
            ht.load_pretrained(net, folder)
        same(bits(net), before)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("says", "change"),
        [
            ("finite scales above zero", {"3.weight_scale": torch.tensor([float("nan")])}),
            ("finite scales above zero", {"3.weight_scale": torch.tensor([1e-60], dtype=torch.float64)}),
            ("elements are required beside scales", {"3.weight": None}),
            ("scales are required beside elements", {"3.weight_scale": None}),
            ("weight or weight_packed is required", {"3.weight_packed": torch.zeros(64, 32, dtype=torch.uint8)}),
            ("weight_packed is required beside", {"3.weight_global_scale": torch.ones(1)}),
            ("got both", {"3.weight_scale_inv": torch.ones(1, 1)}),
            ("got no", {"3.bias": None}),
            (r"3\.bias of \[64\] is required", {"3.bias": torch.ones(1)}),
            (r"1\.num_batches_tracked in torch\.int64", {"1.num_batches_tracked": torch.tensor(1.0)}),
            (r"3\.weight: elements that are numbers", {"3.weight": torch.full((64, 64), 0xFF, dtype=torch.uint8)}),
            (
                "scales are required with which elements are finite, got up to 3e",
                {"3.weight_scale": torch.tensor([3e38])},
            ),
            (
                r"3\.bias: values that are numbers are required, got 64 NaN of 64",
                {"3.bias": torch.full((64,), torch.nan)},
            ),
            (r"3\.bias: values that torch\.float32 holds", {"3.bias": torch.full((64,), 1e300, dtype=torch.float64)}),
        ],
        ids=[
            *(
                "nan",
                "tiny",
                "no-elements",
                "no-scales",
                "packed-too",
                "global-too",
                "both",
                "missing",
                "bias",
                "dtype",
            ),
            *("nan-elements", "huge", "nan-bias", "overflow"),
        ],
    )
    def test_where_the_last_tensor_is_wrong(self, kind, says, change, tmp_path):
        folder = ht.export_pretrained(model(seed=1), tmp_path / "out", dtype=torch.float32)
        changed = {**load_file(folder / "model.safetensors"), **change}
        if changed["3.weight"] is not None:
            changed["3.weight"] = changed["3.weight"].view(torch.float8_e4m3fn)
        (tmp_path / "bad").mkdir()
        save_file({name: t for name, t in changed.items() if t is not None}, tmp_path / "bad" / "model.safetensors")
        net = model(kind)
        before = bits(net)
        with pytest.raises(ValueError, match=says):
            ht.load_pretrained(net, tmp_path / "bad")
        same(bits(net), before)

    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize(
        ("stored", "size"), [("stacked", (EXPERTS + 1, HIDDEN, WIDTH)), ("separate", (EXPERTS, HIDDEN, 2 * WIDTH))]
    )
    def test_where_experts_are_others(self, persistent, stored, size, tmp_path):
        """Of more experts the first ones were loaded."""
        one = ht.quantize_(Experts(size[0], *size[1:]), "fp8_rowwise", persistent=True)
        folder = ht.export_pretrained(one, tmp_path / "out", experts=stored)
        net = ht.quantize_(Experts(EXPERTS, HIDDEN, WIDTH), "fp8_rowwise", persistent=persistent)
        before = bits(net)
        with pytest.raises(ValueError, match="is required, got"):
            ht.load_pretrained(net, folder)
        same(bits(net), before)

    def test_where_rows_of_an_expert_could_be_spread(self, tmp_path):
        """One row for all of them is no matrix."""
        net = Experts(2, 64, 64)
        tensors = {f"{e}.{name}.weight": torch.ones(64, 64) for e in range(2) for name in ("w1", "w2", "w3")}
        save_file({**tensors, "1.w3.weight": torch.ones(1, 64)}, tmp_path / "model.safetensors")
        before = bits(net)
        with pytest.raises(ValueError, match=r"1\.w3\.weight of \[64, 64\] is required, got \[1, 64\] in the folder"):
            ht.load_pretrained(net, tmp_path)
        same(bits(net), before)


@pytest.mark.parametrize(
    "spec",
    [
        "nvfp4+four_over_six",
        "nvfp4+one_d+four_over_six",
        "nvfp4+four_over_six+four_over_six_448",
        "mxfp4",
        "mxfp4+mx_two_d+mx_floor",
    ],
)
def test_faces_of_fp4_come_back(spec, tmp_path):
    """Folders of NVFP4 have the global scale, of whichever largest block scale it is."""
    plain = model("plain", seed=1)
    with (
        torch.no_grad()
    ):  # the last one over 256 has a global scale that no amax has over 448; of the others there is one
        for layer, amax in ((0, 0.30078125), (2, 1.1015625), (3, 0.125)):
            plain[layer].weight[0, 0] = amax
    net = ht.quantize_(plain, spec + "+bf16_weight_values", persistent=True)
    folder = ht.export_pretrained(net, tmp_path / "out")
    other = ht.load_pretrained(model("persistent", spec + "+bf16_weight_values"), folder)
    for name in ("0.weight", "2.weight", "3.weight"):
        mine, theirs = (flatten(one.get_parameter(name).rowwise)[0] for one in (net, other))
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True))


class TestAWriteThatFails:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("spec", SPECS)
    def test_leaves_the_model_as_it_was(self, kind, spec, tmp_path, monkeypatch):
        """Wherever it is: after a face, between two weights, at the last tensor."""
        folder = ht.export_pretrained(model(kind, spec, seed=1), tmp_path / "out", dtype=torch.float32)
        for number in itertools.count(1):
            net = model(kind, spec)
            before = bits(net)
            with monkeypatch.context() as patch:
                fail_at(patch, number)
                try:
                    ht.load_pretrained(net, folder)
                except OSError:
                    same(bits(net), before)
                else:
                    break
        assert number > 11  # parameters and buffers

    def test_leaves_the_master_of_an_optimizer_as_it_was(self, tmp_path, monkeypatch):
        folder = ht.export_pretrained(model(seed=1), tmp_path / "out", dtype=torch.float32)
        net = model()
        optimizer = ht.optim.MasterWeights(torch.optim.SGD, net.parameters(), lr=0.1)
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        before = bits(net)
        with monkeypatch.context() as patch:
            seen = fail_at(patch, 14)
            with pytest.raises(OSError, match="the device is gone"):
                ht.load_pretrained(net, folder)
        assert len(seen) > 14  # those that set it back
        same(bits(net), before)

    def test_leaves_weights_with_a_common_scale_as_they_were(self, tmp_path, monkeypatch):
        """A write of one of them quantizes the others anew."""
        save_file({f"{i}.weight": 7.0 * torch.randn(64, 64) for i in range(3)}, tmp_path / "model.safetensors")
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        ht.quantize_(net, "fp8", persistent=True, common_scale=[["0", "1", "2"]])
        common = net[0].weight.record.layer.common
        before, amax = bits(net), common.amax.clone()
        for number in itertools.count(1):
            with monkeypatch.context() as patch:
                fail_at(patch, number)
                try:
                    ht.load_pretrained(net, tmp_path)
                except OSError:
                    same(bits(net), before)
                    assert torch.equal(common.amax, amax)
                else:
                    break
        assert number > 3
        assert not torch.equal(common.amax, amax)


def hub(tmp_path, kind="models--org--net"):
    """Write a folder into the cache of a hub, as ``snapshot_download`` leaves it; return the snapshot."""
    written = ht.export_pretrained(model(seed=1), tmp_path / "written", shard_bytes=10_000, dtype=torch.float32)
    snapshot = tmp_path / "hub" / kind / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def loads(folder):
    net = ht.load_pretrained(model(), folder)
    assert torch.equal(net[3].weight.dequantize(), model(seed=1)[3].weight.dequantize())


class TestLinks:
    @pytest.mark.parametrize("kind", ["models--org--net", "datasets--org--net"])
    @pytest.mark.parametrize("digests", [True, False])
    def test_snapshots_of_the_hub(self, kind, digests, tmp_path):
        snapshot = hub(tmp_path, kind)
        assert len(list(snapshot.glob("*.safetensors"))) > 1
        if not digests:
            (snapshot / "digests.json").unlink()
        loads(snapshot)
        (tmp_path / "latest").symlink_to(snapshot)  # the folder that the caller names
        loads(tmp_path / "latest")

    def test_bytes_of_blobs_are_checked(self, tmp_path):
        snapshot = hub(tmp_path)
        blob = (snapshot / "model-00001-of-00002.safetensors").resolve(strict=True)
        blob.write_bytes(blob.read_bytes()[:-1] + b"\x7f")
        with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors as it was written is required"):
            ht.load_pretrained(model(), snapshot)

    @pytest.mark.parametrize("absolute", [True, False])
    def test_links_inside_the_folder(self, absolute, tmp_path):
        folder = ht.export_pretrained(model(seed=1), tmp_path / "out", dtype=torch.float32)
        (folder / "files").mkdir()
        for name in ("model.safetensors", "digests.json"):
            (folder / name).rename(folder / "files" / name)
            (folder / name).symlink_to(folder / "files" / name if absolute else f"files/{name}")
        loads(folder)

    @pytest.mark.parametrize(
        "name", ["model-00002-of-00002.safetensors", "digests.json", "model.safetensors.index.json"]
    )
    @pytest.mark.parametrize("where", ["absolute", "up", "another model", "beside blobs"])
    @pytest.mark.parametrize("digests", [True, False])
    def test_everything_else_is_refused(self, name, where, digests, tmp_path):
        """Also where the other file has the right bytes."""
        snapshot = hub(tmp_path)
        link = snapshot / name
        blob = link.resolve(strict=True)
        if not digests:
            (snapshot / "digests.json").unlink()
            if name == "digests.json":
                blob.touch()
        link.unlink(missing_ok=True)
        places = {
            "absolute": tmp_path / "elsewhere" / "file", "up": snapshot.parent / "file",
            "another model": tmp_path / "hub" / "models--org--other" / "blobs" / "file",
            "beside blobs": snapshot.parent.parent / "blobs-of-others" / "file",
        }  # fmt: skip
        places[where].parent.mkdir(exist_ok=True, parents=True)
        blob.rename(places[where])
        link.symlink_to(places[where] if where == "absolute" else os.path.relpath(places[where], snapshot))
        net = model()
        before = bits(net)
        with pytest.raises(ValueError, match=f"load_pretrained: .*{name}"):
            ht.load_pretrained(net, snapshot)
        same(bits(net), before)

    def test_blobs_are_those_of_a_cache_alone(self, tmp_path):
        """A folder that is no snapshot of a hub may not reach up into one called blobs."""
        snapshot = hub(tmp_path, "run")
        with pytest.raises(
            ValueError, match=r"digests\.json .* or in the blobs of its cache, is required, got a link to"
        ):
            ht.load_pretrained(model(), snapshot)

    def test_blobs_that_are_a_link(self, tmp_path):
        snapshot = hub(tmp_path)
        blobs = snapshot.parent.parent / "blobs"
        blobs.rename(tmp_path / "elsewhere")
        blobs.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="in the blobs of its cache, is required"):
            ht.load_pretrained(model(), snapshot)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_do_not_fit(kind, tmp_path):
    """Packed columns that are no multiple of a block."""
    codes, scale = torch.zeros(64, 7, dtype=torch.uint8), torch.zeros(64, 0).to(torch.float8_e4m3fn)
    tensors = dict(ht.inference_tensors(model("plain"), dtype=torch.float32))
    del tensors["3.weight"]
    tensors |= {"3.weight_packed": codes, "3.weight_scale": scale, "3.weight_global_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    net = model(kind, "nvfp4")
    before = bits(net)
    with pytest.raises(ValueError, match=r"3\.weight: uint8 weight_packed \[64, 7\] with weight_scale"):
        ht.load_pretrained(net, tmp_path)
    same(bits(net), before)


@pytest.mark.parametrize("kind", KINDS)
def test_in_inference_mode(kind, tmp_path):
    folder = ht.export_pretrained(model(kind, seed=1), tmp_path / "out", dtype=torch.float32)
    net = model(kind)
    with torch.inference_mode():
        ht.load_pretrained(net, folder)
    same(bits(net), bits(ht.load_pretrained(model(kind), folder)))


class TestFalseClaims:
    """What index and configuration say of the tensors must be so."""

    @pytest.fixture
    def folder(self, tmp_path):
        """One in two files."""
        tensors = dict(ht.inference_tensors(model(), dtype=torch.float32))
        index = {name: f"{int(name == '3.bias')}.safetensors" for name in tensors}
        for file in ("0.safetensors", "1.safetensors"):
            save_file({name: tensors[name] for name in tensors if index[name] == file}, tmp_path / file)
        return tmp_path, index

    def loaded(self, folder, index):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        ht.load_pretrained(model(seed=1), folder)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (
                {"3.bias": "0.safetensors", "3.weight": "1.safetensors"},
                r"'3\.bias' in 0\.safetensors by .* in 1\.safetensors of",
            ),
            ({"ghost": "0.safetensors"}, r"'ghost' in 0\.safetensors by .* in no file of"),
            ({"3.weight": None}, r"'3\.weight' in no file by .* in 0\.safetensors of"),
        ],
    )
    def test_an_index(self, folder, change, told):
        path, index = folder
        self.loaded(path, index)
        with pytest.raises(ValueError, match=f"an index that has each tensor with its file is required, got {told}"):
            self.loaded(path, {name: file for name, file in (index | change).items() if file is not None})

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("{", "config.json as transformers writes it is required"),
            ('{"quantization_config": 3}', "config.json as transformers writes it is required"),
            ('{"quantization_config": {"quant_method": "gptq"}}', "a quant_method of .* is required .* got 'gptq'"),
            (
                '{"quantization_config": {"quant_method": ["fp8"]}}',
                r"a quant_method of .* is required .* got \['fp8'\]",
            ),
            (
                '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}',
                r"a weight_block_size of \[128, 128\] is required .* got \[64, 64\]",
            ),
        ],
    )
    def test_a_configuration(self, folder, text, told):
        path, index = folder
        (path / "config.json").write_text('{"quantization_config": null, "time_step_limit": [0.0, Infinity]}')
        self.loaded(path, index)
        (path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=told):
            self.loaded(path, index)


def test_a_folder_that_is_refused_closes_its_files(tmp_path):
    for name in ("a", "b"):
        save_file({"weight": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    closed = []

    @contextlib.contextmanager
    def opened(path, framework):
        with safetensors.safe_open(path, framework=framework) as file:
            yield file
        closed.append(path)

    library = types.SimpleNamespace(safe_open=opened, SafetensorError=safetensors.SafetensorError)
    with pytest.raises(ValueError, match="each tensor in one file"):
        Folder("test", library, tmp_path)
    assert len(closed) == 2
