"""Every private name of FSDP2 that the library uses is there and means what it did."""

import ast
from pathlib import Path

import torch
from processes import here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht
from hybridtensor.distributed.fsdp import torch_compat
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam, all_params, params_of

PACKAGE = Path(ht.__file__).parent


def names_are_there(rank):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=init_device_mesh(here(), (2,)))
    fully_shard(model, mesh=init_device_mesh(here(), (2,)), reshard_after_forward=True)
    (sharded,) = (s for s in params_of(model[1]) if s.param._module_info.param_name == "weight")
    assert list(sharded.under_the_same_root())
    model(torch.ones(1, 8))
    assert len(list(sharded.under_the_same_root())) == 4
    assert sharded in list(all_params())
    for name, value in vars(ShardedParam).items():
        if isinstance(value, property):
            getattr(sharded, name)
    assert (sharded.size, sharded.padded_size, sharded.dim, sharded.num_ranks, sharded.rank) == (
        (8, 8),
        (4, 8),
        0,
        2,
        rank,
    )
    assert sharded.wants() == (True, True)
    assert not sharded.before_backward
    for name in ("_training_state", "reshard_after_backward", "_reshard_after_forward", "_use_post_forward_mesh",
                 "post_forward_mesh_info", "mesh_info", "is_unsharded", "_to_sharded", "use_training_state", "unshard",
                 "wait_for_unshard", "fsdp_params"):  # fmt: skip
        assert hasattr(sharded.group, name), name
    for name in ("all_gather_outputs", "_unsharded_inner_tensors", "sharded_param", "_orig_size", "mp_policy",
                 "offload_to_cpu"):  # fmt: skip
        assert hasattr(sharded.param, name), name
    outputs, sharded.param.all_gather_outputs = sharded.param.all_gather_outputs, []
    sharded.gather_again()
    assert len(outputs) == len(sharded.param.all_gather_outputs) == 1
    assert model[1].weight.shape == (8, 8)
    sharded.reshard()
    assert sharded.group.is_sharded


def test_private_names(two):
    two.run(names_are_there)


def test_private_names_of_fsdp2_are_in_one_file():
    private = {"_fully_shard", "_composable_state", "_local_tensor"}
    allowed = {Path(torch_compat.__file__), PACKAGE / "dtensor.py"}  # a DTensor's own part
    for path in PACKAGE.rglob("*.py"):
        if path not in allowed:
            for node in ast.walk(ast.parse(path.read_text())):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert not private & set(module.split(".")), path
                assert not (isinstance(node, ast.Attribute) and node.attr == "_local_tensor"), path
