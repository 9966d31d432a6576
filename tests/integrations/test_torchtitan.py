"""torchtitan's debug model on two ranks, as its Trainer makes it: meta device, FSDP2 or tensor parallel.

On a CPU its Trainer does not run, and its attention has no backward: the steps of the first are done here, and plain
attention stands in for the second. Its default for sharding, ``spmd_types``, needs a newer torch than 2.13.
"""

import types
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import hybridtensor as ht
from hybridtensor.dtensor import local

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-integrations")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
BACKEND = "partial_dtensor"
STEPS = 3


def spec_of(way, recipe, num_layers=2):
    """Return the debug model, quantized in one of the two ways, and plain attention in it."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    from hybridtensor.integrations.torchtitan import HybridConverter, advancing, quantized

    spec = model_registry("debugmodel", converters=None)
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    spec.model.layers = spec.model.layers[:num_layers]
    if way == "converter":
        converter = HybridConverter.Config(recipe=recipe, keep_bf16=["layers.1"]).build()
        spec.model = converter.convert(spec.model)
        return advancing(spec)
    return quantized(spec, recipe, keep_bf16=["layers.1"]) if way == "parallelize_fn" else spec


def trained(way, recipe, tp=1, compiled=False):
    """Do what Trainer does, and return the losses and the model."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as titan

    parallel_dims.device_type = "cpu"  # it takes CUDA where there is no accelerator
    titan.set_spmd_backend(BACKEND)
    spec = spec_of(way, recipe, num_layers=6 if compiled else 2)
    parallelism = ParallelismConfig(spmd_backend=BACKEND, tensor_parallel_degree=tp, enable_sequence_parallel=tp > 1)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.model.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=parallelism, compile_config=CompileConfig(enable=compiled, backend="aot_eager"),
        ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    optimizers = default_adamw(lr=1e-3, implementation="foreach").build(model_parts=[model])
    if spec.post_optimizer_build_fn is not None:
        spec.post_optimizer_build_fn(optimizers, [model], dims)
    losses, context = [], titan.get_spmd_context(parallel_dims=dims)
    part = dist.get_rank() if tp == 1 else 0
    for step in range(STEPS):
        tokens = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(10 * step + part))
        with context():
            logits = model(tokens[:, :-1])
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses, model


def values(model):
    return [v.clone() for v in (local(t) for t in model.state_dict().values())]


def states(model):
    return [module for module in model.modules() if isinstance(module, ht.LayerState)]


def trains(rank, tp):
    warnings.simplefilter("ignore")  # of torchtitan
    plain, _ = trained("plain", None, tp)
    for recipe in ("fp8", "fp8_delayed", "nvfp4"):
        check(plain, recipe, tp)


def check(plain, recipe, tp):
    """Compare runs of one recipe with each other, bitwise, and with the losses of the plain model."""
    runs = [trained(way, recipe, tp) for way in ("converter", "parallelize_fn", "converter")]
    losses, model = runs[0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=2**-7)  # random weights hardly predict anything
    for other_losses, other in runs[1:]:  # bitwise the same, in both ways and again
        assert other_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(values(model), values(other), strict=True))
    converted = {n for n, p in model.named_parameters() if isinstance(local(p), ht.MasterWeight)}
    assert len(converted) == 5
    assert all(name.startswith("layers.0.") for name in converted)
    kept = states(model)
    assert [f"{state.name}.weight" in converted for state in kept] == [True] * (5 if recipe != "fp8" else 0)
    for state in kept:
        if state.rounding is not None:
            assert state.rounding.tolist() == [ht.state.keys.hash64(state.name), STEPS]
        if state.encode_scale is not None:
            assert (state.amax_history > 0).sum(1).tolist() == [STEPS] * len(state.slots)
            gathered = [torch.empty_like(state.encode_scale) for _ in range(2)]
            dist.all_gather(gathered, state.encode_scale)
            assert torch.equal(*gathered)


@pytest.mark.parametrize("tp", [1, 2], ids=["fsdp", "tp"])
def test_the_debug_model_trains_repeatably_on_two_ranks(tp, tmp_path):
    processes.run(trains, 2, tmp_path, tp)


def test_a_state_that_is_no_module_of_torchtitan_would_be_refused():
    """What ``verify_module_protocol`` is for, and the other way to convert does not pass."""
    spec = spec_of("plain", None)
    with torch.device("meta"):
        model = spec.model.build()
        ht.quantize_(model, "nvfp4")
    with pytest.raises(RuntimeError, match="quantization_state"):
        model.verify_module_protocol()


def test_expert_parallel_models_with_state_are_refused():
    spec = spec_of("converter", "nvfp4")
    with torch.device("meta"):
        model = spec.model.build()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(NotImplementedError, match="a recipe without state is required for expert parallel"):
        spec.post_optimizer_build_fn(optimizer, [model], types.SimpleNamespace(ep_enabled=True))


def compiles(rank):
    warnings.simplefilter("ignore")  # of torchtitan
    graphs = {}
    for way, recipe in (("plain", None), ("converter", "fp8"), ("converter", "fp8_delayed")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trained(way, recipe, compiled=True)
        graphs[recipe] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain = graphs.pop(None)
    # the layer that stays in bf16 is a kind of block of its own
    assert plain > 0
    assert all(count == 2 * plain for count in graphs.values()), (plain, graphs)


def test_blocks_of_one_kind_share_a_graph(tmp_path):
    processes.run(compiles, 2, tmp_path)
