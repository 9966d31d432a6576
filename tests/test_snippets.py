"""Every Python snippet of the README and of the pages in ``docs`` runs.

Snippets of frameworks are lines of scripts that run: see ``integrations/test_examples.py``.
"""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from blocks import Blocks, Mixture
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import checkpoint

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


STORIES = ("docs/how-a-layer-runs.md", "docs/tutorial.md")
"""Pages whose snippets go on from each other."""


def snippets(path):
    """Return the Python of a page, block by block or as one, but for that of frameworks."""
    found = [textwrap.dedent(code) for _, code in FENCED.findall((ROOT / path).read_text())]
    found = [code for code in found if "hybridtensor.integrations" not in code]
    return ["\n".join(found)] if path in STORIES else found


PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
EVERY = [(path, number) for path in PAGES for number in range(len(snippets(path)))]


class Projections(nn.Module):
    """Layers of which engines make one."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj = (nn.Linear(64, 64) for _ in range(5))


def small(tmp_path):
    """Return what a snippet takes for granted: a model, an optimizer, data, a loop's length."""
    model = ht.quantize_(Blocks(), "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 64)
    data = [batch] * 3
    return {"model": model, "optimizer": optimizer, "batch": batch, "batches": data, "data": data, "steps": 10}


def plain(tmp_path):
    return small(tmp_path) | {"model": Blocks()}


def several_gpus(tmp_path):
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    tokens, labels = torch.randn(2, 2, 32, 64)
    torch_s = {
        "fully_shard": fully_shard,
        "parallelize_module": parallelize_module,
        "SequenceParallel": SequenceParallel,
        "Shard": Shard,
        "Replicate": Replicate,
        "loss_fn": nn.functional.mse_loss,
    }
    plan = {"blocks.0": ht.distributed.ColwiseParallel(), "blocks.1": ht.distributed.RowwiseParallel()}
    return {"model": Blocks(), "mesh": mesh, "plan": plan, "tokens": tokens, "labels": labels, **torch_s}


def experts(tmp_path):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    model = Mixture().bfloat16()
    return {"model": model, "block": model, "mesh": mesh, "parallelize_module": parallelize_module}


def pipelines(tmp_path):
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    return {
        "blocks": blocks, "stage": blocks[0], "rank": 0, "ranks": 1, "device": torch.device("cpu"),
        "mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("pp",)), "loss_fn": nn.functional.mse_loss,
        "data": [torch.randn(2, 32, 64)] * 2, "PipelineStage": PipelineStage, "Schedule1F1B": Schedule1F1B,
        "dist": dist, "checkpoint": checkpoint, "ranks_of_stages": [[0]], "number": 0, "step": 0,
        "optimizer": torch.optim.AdamW(blocks[0].parameters()),
    }  # fmt: skip


def engines(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model, other = (transformers.LlamaForCausalLM(config).bfloat16() for _ in range(2))
    ht.quantize_(model, "fp8_rowwise")
    ht.quantize_(other, "fp8_rowwise", persistent=True)
    return {"model": model, "other_model": other, "engine_weights": {}, "folder": tmp_path / "exported"}


def experts_in_mxfp4(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    return {"gpt_oss": transformers.GptOssForCausalLM(config).bfloat16(), "folder": tmp_path / "exported"}


def as_deepseek_v4(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(
        hidden_size=128, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=64, n_routed_experts=2, num_experts_per_tok=1, q_lora_rank=128, o_lora_rank=64,
        o_groups=2, index_n_heads=2, index_head_dim=64, layer_types=["compressed_sparse_attention"] * 2,
    )  # fmt: skip
    return {"deepseek_v4": transformers.DeepseekV4ForCausalLM(config).bfloat16(), "folder": tmp_path / "exported"}


def common_scales(tmp_path):
    return {"model": nn.ModuleList([Projections()])}


SCOPES = {
    "docs/distributed.md": several_gpus,
    "docs/experts.md": experts,
    "docs/pipeline.md": pipelines,
    "docs/inference.md": engines,
    ("docs/inference.md", 1): experts_in_mxfp4,
    ("docs/inference.md", 2): as_deepseek_v4,
    ("docs/inference.md", 3): common_scales,
    ("docs/recipes.md", 1): plain,
    "docs/choosing-a-recipe.md": plain,
    "docs/migrating.md": plain,
}


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    """A group of one rank; snippets write where nothing is."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with inductor.patch(_micro_pipeline_tp=False):  # which one sets
        yield
    dist.destroy_process_group()


def run(path, number, tmp_path):
    """Run one snippet, and return its names."""
    make = SCOPES.get((path, number), SCOPES.get(path, small))
    scope = {"ht": ht, "torch": torch, "nn": nn}
    if path == "docs/tutorial.md":
        pytest.importorskip("transformers", reason="its model is trained")
    if path != "README.md" and path not in STORIES:
        scope |= make(tmp_path)
    exec(snippets(path)[number], scope)
    return scope


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:`enable_symm_mem_for_group` is deprecated:FutureWarning")  # torch 2.11 needs it
@pytest.mark.parametrize(("path", "number"), EVERY)
def test_snippets_run(path, number, tmp_path):
    torch.manual_seed(0)
    run(path, number, tmp_path)


def test_the_pages_have_snippets():
    assert len(EVERY) >= 13
    text = "\n".join((ROOT / path).read_text() for path in PAGES)
    blocks = len(re.findall(r"^ *```python$", text, re.MULTILINE))
    assert blocks == len(FENCED.findall(text))


def test_the_first_example_needs_nothing_else(tmp_path, capsys):
    scope = run("README.md", 0, tmp_path)
    assert "Quantized layers" in capsys.readouterr().out
    assert all(str(scope["model"][i].weight.config) == "fp8/fp8_rowwise/bf16" for i in (0, 2))
    assert scope["optimizer"].state


def test_the_first_example_has_ten_lines():
    assert len([line for line in snippets("README.md")[0].splitlines() if line.strip()]) <= 10


def test_a_schedule_changes_the_recipes_of_inner_blocks(tmp_path):
    blocks = run("docs/recipes.md", 1, tmp_path)["model"].blocks
    assert [str(block.weight.config) for block in blocks[1:2]] == ["bf16/nvfp4/nvfp4"]
    assert all(type(blocks[i].weight) is nn.Parameter for i in (0, 2, 3))


@pytest.mark.usefixtures("one_rank")
def test_the_code_of_the_checkpoints_leaves_what_it_says(tmp_path):
    assert run("docs/checkpoints.md", 0, tmp_path)["step"] == 200
    assert (tmp_path / "runs" / "model.safetensors").exists()
