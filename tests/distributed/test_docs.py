"""The table of what FSDP2 sends is what the plans say."""

from pathlib import Path

import torch

import hybridtensor as ht
from hybridtensor.distributed.fsdp.payload import bytes_per_rank
from hybridtensor.distributed.fsdp.plan import make_plan

DOCS = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
WANTED = ((True, False), (False, True), (True, True))


def test_table_of_bytes():
    expected = []
    for name, recipe in ht.recipes.RECIPES.items():
        plan = make_plan(recipe(), (4096, 4096), 8, 0)
        sent = [bytes_per_rank(plan, *wanted, torch.bfloat16, torch.float32) for wanted in WANTED]
        cells = [f"{nbytes / (2 * 512 * 4096):.3f}x" for nbytes in sent]
        expected.append(f"| `{name}` | {' | '.join(cells)} | {plan.reduce or ''} |")
    table = DOCS.split("<!-- table: gathers -->\n")[1].split("\n\n")[0].splitlines()[2:]
    assert table == expected
