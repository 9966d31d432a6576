"""A valid call of every public callable, with the kinds of arguments that it takes; see ``wrong_use``."""

import datetime
import functools
import tempfile
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hybridtensor as ht
from hybridtensor import recipes, testing
from hybridtensor.distributed import checkpoint
from hybridtensor.formats import Format, get_format, register_format
from hybridtensor.subclasses import IdentityTensor, QuantizedTensor

HALF = torch.ones(32, 32, dtype=torch.float32)
FP8 = ht.HybridConfig.parse("fp8")

KINDS = {
    "None": lambda: None,
    "text": lambda: "nonsense",
    "integer": lambda: 3,
    "negative": lambda: -1,
    "fraction": lambda: 1.5,
    "nan": lambda: float("nan"),
    "flag": lambda: True,
    "list": lambda: [0],
    "dictionary": lambda: {"a": 0},
    "object": object,
    "module": nn.Identity,
    "function": lambda: lambda *args: None,
    "class": lambda: int,
    "dtype": lambda: torch.int8,
    "integers": lambda: torch.ones(32, 32, dtype=torch.int32),
    "complex": lambda: torch.ones(32, 32, dtype=torch.complex64),
    "sparse": lambda: HALF.to_sparse(),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "meta": lambda: HALF.to("meta"),
    "quantized": lambda: ht.Float8Quantizer().quantize(HALF),
}
EVERYTHING = tuple(KINDS)


def nested(layout):
    """Return a nested tensor of two matrices."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)], layout=layout)


@dataclass
class Row:
    """A valid call.

    Attributes:
        make: Returns what is called, and the arguments of a valid call by name, made anew.
        accepts: Kinds that a parameter takes.
        plumbing: Parameters that are only for this package, with which it calls on every product.
    """

    make: object
    accepts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plumbing: tuple[str, ...] = ()


def row(call, accepts=None, plumbing=(), /, **arguments):
    """Return a row; an argument that is a function without parameters is made anew for each call."""

    def make():
        return call, {n: a() if isinstance(a, types.LambdaType) else a for n, a in arguments.items()}

    kinds = {name: tuple(of.split()) if isinstance(of, str) else of for name, of in (accepts or {}).items()}
    return Row(make, kinds, plumbing)


def method(make, name, accepts=None, /, **arguments):
    """Return a row of a method of what ``make`` returns."""
    made = row(None, accepts, **arguments)
    return Row(lambda: (getattr(make(), name), made.make()[1]), made.accepts)


CONFIG_KINDS = dict.fromkeys(("save_original_input", "fast_accum", "bf16_weight_values"), "flag")
CONFIG_KINDS["backward_override"] = "None"


def linear(recipe="fp8", **options):
    return ht.quantize_(nn.Linear(32, 32, bias=False), recipe, **options)


def _total(model, batch):
    return model(batch).sum()


@functools.cache
def recording():
    """Return one recording, which nobody writes to."""
    model = linear()
    with ht.watch(model, every=1) as watched:
        model(torch.ones(4, 32)).sum().backward()
        watched.step()
    return watched.recording()


def persistent():
    return linear(persistent=True).weight


def masters():
    return ht.optim.MasterWeights(torch.optim.SGD, [persistent()], lr=0.1)


def entered(context):
    """Return a function that opens a context and closes it."""

    def call(*args, **kwargs):
        with context(*args, **kwargs):
            pass

    return call


def sharing(enabled):
    with ht.share_inputs(enabled):
        pass


def debugging(offsets):
    with ht.debug(offsets=offsets):
        pass


def meshed(mesh, **arguments):
    """Call ``set_mesh_`` with a mesh of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if mesh == "a mesh":
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        return ht.set_mesh_(mesh=mesh, **arguments)
    finally:
        dist.destroy_process_group()


def in_context(**fields):
    return ht.Float8Quantizer().quantize(HALF, context=ht.Context(**fields))


def alone(call):
    """Return ``call`` among the one rank of a group."""

    def among_one(*args, **kwargs):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            return call(*args, **kwargs)
        finally:
            dist.destroy_process_group()

    return among_one


FOLDER = tempfile.TemporaryDirectory()
STEPS = iter(range(10**6))


def fresh():
    """Return a path that is not there."""
    return str(Path(FOLDER.name) / f"new{next(STEPS)}")


def saved():
    """Return a folder with a checkpoint."""
    folder = Path(FOLDER.name) / "saved"
    if not folder.exists():
        checkpoint.save(folder, 0, {"model": linear()})
    return str(folder)


def exported():
    """Return a safetensors file."""
    path = Path(FOLDER.name) / "saved.safetensors"
    return str(path if path.exists() else ht.export_safetensors(linear(), path))


def pretrained():
    """Return a folder that was exported."""
    path = Path(FOLDER.name) / "pretrained"
    return str(path if path.exists() else ht.export_pretrained(linear(), path))


def waited(*args, **kwargs):
    return checkpoint.async_save(*args, **kwargs).result()


def blocks():
    return nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


def face():
    return ht.Float8Quantizer().quantize(HALF).rowwise.face


SAVE = {"directory": fresh, "step": 1, "state": lambda: {"model": linear()}, "faces": True, "overwrite": False,
        "check_replicas": False, "group": None, "timeout": datetime.timedelta(minutes=1)}  # fmt: skip
SAVES = {
    "directory": "text",
    "step": "integer",
    "faces": "flag",
    "overwrite": "flag",
    "check_replicas": "flag",
    "group": "None",
    "state": "dictionary",
}
FP8_TENSOR = ht.Float8Quantizer()

ROWS = {
    # -- the front door
    "quantize_": row(
        ht.quantize_,
        {"filter_fn": "None", "persistent": "flag", "name": "None text", "keep_faces": "None"},
        model=lambda: nn.Linear(32, 32), recipe="fp8", filter_fn=None, keep_bf16=(), persistent=False, name=None,
        transposed=(), common_scale=(), keep_faces="auto",
    ),
    "swiglu": row(ht.swiglu, {"up": "None", "into": "module"}, gate=HALF, up=HALF, into=(), outputs_of=()),
    "rms_norm": row(
        ht.rms_norm, {"weight": "None", "eps": "None integer fraction", "into": "module"},
        x=HALF, weight=torch.ones(32), eps=1e-5, into=(),
    ),
    "set_config_": row(ht.set_config_, model=linear, recipe="mxfp8"),
    "explain": row(ht.explain, {"model": "module", "show": "flag"}, model=linear, show=False),
    "check": row(
        lambda model, input, **options: ht.check(model, input, **options),
        {"model": "module", "loss": "None", "strict": "flag", "show": "flag"}, ("input",),
        model=linear, input=lambda: torch.ones(4, 32), loss=None, strict=False, show=False,
    ),
    "watch": row(
        entered(ht.watch), {"every": "integer", "alarm": "None function", "saturated": "integer fraction"},
        model=linear, every=2, rows=128, sinks=(), alarm=None, saturated=1.0,
    ),
    "watch.note": method(
        lambda: ht.watch(linear()), "note", {"loss": "integer negative fraction nan", "step": "None integer"},
        loss=1.0, step=2,
    ),
    "report": row(
        ht.report, {"path": "text", "beside": "None"},
        watched=recording(), path=lambda: fresh() + ".html", beside=recording(),
    ),
    "advise": row(
        lambda model, batches, **options: ht.advise(model, batches, **options),
        {"budget": "integer fraction", "hardware": "None" if torch.cuda.is_available() else ""}, ("batches",),
        model=lambda: nn.Linear(32, 32), batches=lambda: [torch.ones(4, 32)], formats=("bf16", "fp8"), budget="fp8",
        hardware="b200", loss=lambda: _total,
    ),
    "plain_": row(ht.plain_, {"model": "module", "dtype": "None"}, model=linear, dtype=None),
    "plain_state_dict": row(ht.plain_state_dict, {"model": "module"}, model=linear),
    "export_safetensors": row(
        ht.export_safetensors,
        {"model": "module", "path": "text", "columnwise": "flag", "masters": "None"},
        model=linear, path=fresh, dtype="bf16", columnwise=False, masters=None,
        timeout=datetime.timedelta(minutes=1),
    ),
    "load_safetensors": row(ht.load_safetensors, path=exported, device="cpu"),
    "inference_tensors": row(
        ht.inference_tensors, {"model": "module", "bucket_bytes": "integer"},
        model=linear, layout="auto", experts="separate", dtype=torch.bfloat16, bucket_bytes=1, ranks="all",
        static_inputs=False,
        timeout=datetime.timedelta(minutes=1),
    ),
    "export_pretrained": row(
        ht.export_pretrained, 
        {"model": "module", "folder": "text", "shard_bytes": "integer", "bucket_bytes": "integer"},
        model=linear, folder=fresh, layout="auto", experts="separate", dtype=torch.bfloat16, shard_bytes=100,
        bucket_bytes=1, static_inputs=False, timeout=datetime.timedelta(minutes=1),
    ),
    "load_pretrained": row(
        ht.load_pretrained, {"model": "module", "strict": "flag"}, model=linear, folder=pretrained, strict=False,
    ),
    "mismatch": row(
        ht.mismatch, {"model": "module", "activation": "None", "tensors": "None", "seed": "integer"}, ("batch",),
        model=linear, batch=lambda: torch.randn(4, 32), layout="auto", activation=None, tensors=None, seed=0,
        static_inputs=False,
    ),
    "inference_config": row(
        ht.inference_config, {"model": "module"}, model=linear, layout="auto",
        experts="separate", static_inputs=False,
    ),
    "debug": row(debugging, {"offsets": "flag"}, offsets=True),
    "share_inputs": row(sharing, {"enabled": "flag"}, enabled=True),
    "step_": row(ht.step_, {"model": "module", "skipped": "flag"}, model=linear, skipped=False),
    "without_recording": row(ht.without_recording, {"model": "module"}, model=linear),
    "step_after": row(
        ht.step_after, {"model": "module"},
        optimizers=lambda: torch.optim.SGD([torch.ones(1)]), model=linear,
    ),
    "set_data_parallel_group_": row(
        ht.set_data_parallel_group_, {"model": "module", "group": "None"}, model=linear, group=None
    ),
    "set_mesh_": row(
        meshed, {"model": "module"}, model=linear, mesh="a mesh", dp="dp", cp="cp", tp="tp", ep="ep", pp="pp"
    ),
    "ExpertParallel": row(
        ht.distributed.ExpertParallel, {"ends": "flag"}, dispatch="faces", combine="bf16", gradients="bf16", ends=False
    ),
    # -- quantizers, configs, state
    "Context": row(
        in_context,
        {"state": "None", "direction": "None", "record": "flag", "first_row": "None integer", "section": "None",
         "groups": "None", "after": "None integers complex sparse nested jagged meta quantized"},
        role="weight", state=None, direction=None, record=True, first_row=None, section=None, amaxes=(None, None),
        groups=None, after=None, values=(False, False), direct=False,
    ),
    "Float8Quantizer": row(
        ht.Float8Quantizer, {"pow2_scale": "None flag", "block": "None"},
        granularity="block", dtype="e4m3", pow2_scale=None, block=None,
    ),
    "DelayedFloat8Quantizer": row(
        ht.DelayedFloat8Quantizer, {"margin": "integer negative", "history_length": "integer"},
        dtype="e4m3", margin=0, history_length=4, algorithm="max",
    ),
    "HybridQuantizer": row(ht.HybridQuantizer, rowwise=FP8_TENSOR, columnwise=FP8_TENSOR, columnwise_source="original"),
    "MXFP8Quantizer": row(ht.MXFP8Quantizer, {"two_d": "flag"}, dtype="e4m3", two_d=False),
    "MXFP4Quantizer": row(
        ht.MXFP4Quantizer, {"two_d": "flag", "hadamard": "flag", "seed": "integer"},
        scale_rounding="rceil", two_d=False, hadamard=False, rounding="nearest", seed=0,
    ),
    "NVFP4Quantizer": row(
        ht.NVFP4Quantizer,
        {"row_scaled": "flag", "two_d": "flag", "hadamard": "flag", "seed": "integer", "four_over_six": "None",
         "scale_max": "None"},
        row_scaled=False, two_d=False, hadamard=False, rounding="nearest", seed=0, four_over_six="mae", scale_max=None,
    ),
    "Quantizer.quantize": method(
        ht.Float8Quantizer, "quantize",
        {"x": "meta", "rowwise": "flag", "columnwise": "flag", "dtype": "None"},
        x=HALF, rowwise=True, columnwise=True, dtype=None, context=ht.Context(),
    ),
    "Quantizer.update_": method(
        ht.Float8Quantizer, "update_", {"dst": "quantized"},
        dst=lambda: FP8_TENSOR.quantize(HALF), x=HALF, context=ht.Context(),
    ),
    "HybridConfig": row(
        ht.HybridConfig, CONFIG_KINDS,
        input=FP8_TENSOR, weight=FP8_TENSOR, grad_output=FP8_TENSOR, backward_override=None, save_original_input=False,
        fast_accum=False, bf16_weight_values=False, keep_faces="auto",
    ),
    "HybridConfig.by_gemm": row(
        ht.HybridConfig.by_gemm, CONFIG_KINDS,
        output="fp8", grad_input="fp8", grad_weight="fp8", backward_override=None, save_original_input=False,
        fast_accum=False, bf16_weight_values=False, keep_faces="auto",
    ),
    "HybridConfig.parse": row(ht.HybridConfig.parse, spec="fp8"),
    "HybridConfig.formats": method(lambda: FP8, "formats", gemm=recipes.spec.GEMMS[0]),
    "QuantizerRole": row(
        ht.QuantizerRole, {"name": "text"}, module_type="linear", tensor_type="weight", name="up"
    ),
    "LayerState": row(ht.LayerState, {"name": "None text"}, name="up"),
    "LayerState.of": row(
        ht.LayerState.of, {"name": "None text"}, quantizers={"input": FP8_TENSOR}, name="", device="cpu"
    ),
    # -- tensors
    "MasterWeight": row(
        ht.MasterWeight, {"plain": "meta"}, ("size", "stride", "requires_grad"), plain=HALF, config=FP8,
    ),
    "HybridTensor": row(
        ht.HybridTensor, {"rowwise": "None", "columnwise": "None", "config": "None"},
        ("size", "stride", "requires_grad"),
        rowwise=lambda: FP8_TENSOR.quantize(HALF).rowwise, columnwise=lambda: FP8_TENSOR.quantize(HALF).columnwise,
        config=None,
    ),
    "QuantizedTensor": row(
        QuantizedTensor, {"axis": "negative"}, ("size", "stride", "cuts_group"),
        face=face, axis=-1, nominal_dtype=torch.bfloat16, size=(32, 32),
    ),
    "IdentityTensor": row(IdentityTensor, {"source": "meta"}, ("size", "stride"), source=HALF),
    "MasterWeight.dequantize": method(lambda: linear().weight, "dequantize", {"dtype": "None"}, dtype=None),
    "HybridTensor.dequantize": method(persistent, "dequantize", {"dtype": "None"}, dtype=None),
    "QuantizedTensor.dequantize": method(lambda: persistent().rowwise, "dequantize", {"dtype": "None"}, dtype=None),
    "IdentityTensor.dequantize": method(lambda: IdentityTensor(HALF), "dequantize", {"dtype": "None"}, dtype=None),
    "MasterWeight.numpy": method(lambda: linear().weight.detach(), "numpy", {"force": "flag"}, force=False),
    "HybridTensor.numpy": method(lambda: persistent().detach(), "numpy", {"force": "flag"}, force=False),
    "WrapperTensor.numpy": method(lambda: persistent().detach().rowwise, "numpy", {"force": "flag"}, force=True),
    "HybridTensor.require_face": method(
        persistent, "require_face", {"name": EVERYTHING, "gemm": EVERYTHING}, direction="rowwise", name="x", gemm="y"
    ),
    # -- layers
    "linear": row(
        ht.linear.linear, {"input": "quantized", "bias": "None", "operand": "None"},
        input=lambda: torch.ones(4, 32), weight=lambda: linear().weight, bias=lambda: torch.ones(32), operand=None,
    ),
    # -- costs
    "cost": row(ht.costs.cost, formats=lambda: FP8.formats(recipes.spec.GEMMS[0]), device="h200"),
    "word_of": row(ht.costs.word_of, formats=lambda: FP8.formats(recipes.spec.GEMMS[0])),
    "table": row(ht.costs.table, device="h200"),
    "measure": row(
        ht.costs.measure, {"repeats": "integer"},
        device="cpu", tokens=128, out_features=128, in_features=128, repeats=1,
    ),
    "CostTable": row(
        ht.costs.CostTable, {"name": "text", "device": "text", "counts_casts": "flag", "least_features": "integer"},
        name="own", device="cpu", how="measured", counts_casts=True, least_features=128,
        rows=lambda: (ht.costs.Row("bf16", 1.0, True, "by definition"),),
    ),
    "CostTable.row": method(lambda: ht.costs.table("h200"), "row", formats=lambda: FP8.formats(recipes.spec.GEMMS[0])),
    "CostTable.cost": method(
        lambda: ht.costs.table("h200"), "cost", formats=lambda: FP8.formats(recipes.spec.GEMMS[0])
    ),
    "Row": row(
        ht.costs.Row, {"time": "integer fraction", "native": "flag", "source": "text"},
        word="fp8", time=0.6, native=True, source="measured",
    ),
    # -- recipes
    "Schedule": row(recipes.Schedule, starts=(0,), configs=(FP8,)),
    "Schedule.at": method(lambda: recipes.schedule({0: "fp8"}), "at", {"step": "integer"}, step=0),
    "edge_blocks": row(recipes.edge_blocks, {"last": "integer"}, model=blocks, first=0, last=1),
    "fp8": row(recipes.fp8, {"pow2_scale": "None flag"}, pow2_scale=False),
    "fp8_block": row(recipes.fp8_block, {"pow2_scale": "None flag"}, pow2_scale=False),
    "fp8_rowwise": row(recipes.fp8_rowwise, {"pow2_scale": "None flag"}, pow2_scale=False),
    "fp8_delayed": row(
        recipes.fp8_delayed, {"margin": "integer negative", "history_length": "integer"},
        margin=0, history_length=4, algorithm="max",
    ),
    "nvfp4": row(recipes.nvfp4, {"seed": "integer"}, seed=0),
    "nvfp4_1d_weight": row(recipes.nvfp4_1d_weight, {"seed": "integer"}, seed=0),
    "mxfp8_fwd_nvfp4_bwd": row(recipes.mxfp8_fwd_nvfp4_bwd, {"seed": "integer"}, seed=0),
    "quartet2": row(recipes.quartet2, {"seed": "integer"}, seed=0),
    "from_name": row(recipes.from_name, name="fp8"),
    "by_type": row(
        recipes.by_type, {"linear": "None", "grouped_linear": "None"}, linear="fp8", grouped_linear="mxfp8"
    ),
    "schedule": row(recipes.schedule, recipes={0: "fp8"}),
    # -- formats
    "Format": row(
        Format, {"name": "text", "max": "integer fraction", "element": "None dtype", "scale_dtype": "None dtype",
                 "pow2_scale": "flag", "ragged": "flag", "hadamard": "flag",
                 "tensor_block": "None", "tensor_scale_max": "integer fraction", "values_of": "None text"},
        name="own", element=torch.float8_e4m3fn, max=448.0, block=(1, None), scale_dtype=torch.float32,
        pow2_scale=False, ragged=True, elements_per_byte=1, hadamard=False, tensor_block=None, tensor_scale_max=1.0,
        values_of=None,
    ),
    "Format.bytes_per_row": method(
        lambda: get_format("nvfp4"), "bytes_per_row", {"contraction": "integer"},
        contraction=32, dtype=torch.bfloat16,
    ),
    "register_format": row(register_format, fmt=get_format("nvfp4")),
    "get_format": row(get_format, name="nvfp4"),
    # -- optimizers, offload
    "MasterWeights": row(
        ht.optim.MasterWeights, {}, ("kwargs",),
        optimizer_class=torch.optim.SGD, params=lambda: [persistent()],
    ),
    "MasterWeights.step": method(masters, "step", {"closure": "None function"}, closure=None),
    "MasterWeights.add_param_group": method(masters, "add_param_group", param_group=lambda: {"params": [persistent()]}),
    "MasterWeights.load_state_dict": method(masters, "load_state_dict", state_dict=lambda: masters().state_dict()),
    "offload_activations": row(
        entered(ht.offload.offload_activations),
        {"keep_last": "integer", "min_bytes": "integer", "pin_memory": "None flag"},
        blocks=blocks, keep_last=1, min_bytes=0, pin_memory=None,
    ),
    # -- distributed
    "expect_recompute_": row(
        ht.distributed.expect_recompute_, {"model": "module", "expected": "None flag"}, model=linear, expected=None
    ),
    "quantize_master_weights": row(
        alone(ht.distributed.quantize_master_weights), {"offsets": "list", "group": "None"},
        weights=lambda: [persistent()], master_shards=lambda: [torch.ones(1024)], offsets=[0], group=None,
    ),
    "save": row(checkpoint.save, SAVES, **SAVE),
    "async_save": row(waited, SAVES, **SAVE),
    "load": row(
        checkpoint.load, {"step": "None", "any_recipe": "flag", "group": "None"},
        directory=saved, state=lambda: {"model": linear()}, step=None, any_recipe=False, group=None,
        timeout=datetime.timedelta(minutes=1),
    ),
    "check_replicas": row(
        checkpoint.check_replicas, {"state": "dictionary", "group": "None"},
        state=lambda: {"model": linear()}, group=None, timeout=datetime.timedelta(minutes=1),
    ),
    "latest": row(checkpoint.latest, {"directory": "text"}, directory=saved),
    "verify": row(checkpoint.verify, {"directory": "text"}, directory=saved),
    "plain": row(checkpoint.plain, {"state": EVERYTHING}, state={}),
    # -- what tests of others may use
    "random_tensor": row(
        lambda shape, **options: testing.random_tensor(shape, **options),
        {"shape": "integer", "seed": "integer negative"},
        shape=4, dtype=torch.bfloat16, device="cpu", seed=0,
    ),
    "edge_tensor": row(testing.edge_tensor, dtype=torch.bfloat16, device="cpu"),
    "exact_values": row(testing.exact_values, face=face),
    "saved_by": row(entered(testing.saved_by), modules=blocks),
    "SavedTensors": row(testing.SavedTensors, {"tensors": EVERYTHING}, tensors=[]),  # a record
    "SavedTensors.nbytes": method(testing.SavedTensors, "nbytes", without=()),
    "product_bound": row(
        testing.product_bound, {"accumulate": "integer fraction", "summands": "integer"},
        left=lambda: HALF.double(), right=lambda: HALF.double(), out_dtype=torch.bfloat16, accumulate=2.0**-24,
        summands=0,
    ),
    "float8_oracle": row(
        testing.float8_oracle, {"pow2_scale": "flag"}, x=HALF, dtype="e4m3", granularity="row", pow2_scale=False
    ),
    "mx_oracle": row(testing.mx_oracle, x=HALF, dtype="e4m3", block=(1, 32)),
    "nvfp4_oracle": row(testing.nvfp4_oracle, {"row_scaled": "flag"}, x=HALF, block=(1, 16), row_scaled=False),
    "decode_oracle": row(
        testing.decode_oracle, qdata=lambda: torch.zeros(4, dtype=torch.uint8).numpy(), element="e4m3"
    ),
}  # fmt: skip
