"""The tables of what travels are what the plans say."""

from pathlib import Path

from sharding import bytes_per_rank
from tensor_parallel import SAME_WEIGHT_GRADIENTS

import hybridtensor as ht
from hybridtensor.distributed.fsdp.plan import make_plan, pieces
from hybridtensor.distributed.sequence.plan import gradient_plan, sequence_plan

DOCS = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
WANTED = ((True, False), (False, True), (True, True))


def test_table_of_bytes():
    expected = []
    for name, recipe in ht.recipes.RECIPES.items():
        plan = make_plan(recipe(), (4096, 4096), 8, 0)
        sent = [bytes_per_rank(plan, *wanted) for wanted in WANTED]
        cells = [f"{nbytes / (2 * 512 * 4096):.3f}x" for nbytes in sent]
        expected.append(f"| `{name}` | {' | '.join(cells)} | {plan.reduce or ''} |")
    table = DOCS.split("<!-- table: gathers -->\n")[1].split("\n\n")[0].splitlines()[2:]
    assert table == expected


def share(quantizer, direction):
    """Bytes of one face of many tokens of 4096 features, over those of BF16."""
    fmt = quantizer.rowwise_format if direction == "rowwise" else quantizer.columnwise_format
    rows, columns = (4096, 4096)
    if fmt.is_identity:
        return 1.0
    nbytes = sum(piece.nbytes for piece in pieces(fmt, direction, rows, columns))
    return nbytes / (2 * rows * columns)


def test_table_of_sequence_parallelism():
    expected = []
    for name, recipe in ht.recipes.RECIPES.items():
        config = recipe()
        plan, gradient = sequence_plan(config.input, 4096, 2), gradient_plan(config, 4096, 2)
        forward = 1.0 if plan.reason else share(config.input, "rowwise")
        backward = {"bytes": share(config.input, "columnwise"), "values": 1.0, "quantized": 1.0}.get(plan.column, 0.0)
        backward = 0.0 if plan.reason else backward
        of_gradient = 1.0 if gradient.reason else share(config.grad_output, "rowwise")
        cells = [f"{part:.3f}x" if part else "" for part in (forward, backward, of_gradient)]
        cells.append("bitwise" if name in SAME_WEIGHT_GRADIENTS else "")
        expected.append(f"| `{name}` | {' | '.join(cells)} |")
    table = DOCS.split("<!-- table: sequence -->\n")[1].split("\n\n")[0].splitlines()[2:]
    assert table == expected
