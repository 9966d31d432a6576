"""What is printed of records: each once, however many modules have it."""

import io

from rich.console import Console

from hybridtensor.explanation.rows import GatherRow, Rows, SequenceRow
from hybridtensor.explanation.tables import tables
from hybridtensor.selection import Coverage, PlainMatrix


def printed(**fields):
    console = Console(file=io.StringIO(), width=120)
    console.print(tables(Rows(**{"rows": (), "skipped": (), **fields})))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_module_may_have_several_rows():
    rows = tuple(
        SequenceRow(f"blocks.{i}.up", tensor, "fp8", "bf16", f"of the {tensor}")
        for i in range(3)
        for tensor in ("input", "grad_output")
    )
    lines = printed(sequence=rows)
    assert "blocks.*.up x3 input fp8 bf16 of the input" in lines
    assert "blocks.*.up x3 grad_output fp8 bf16 of the grad_output" in lines


def test_what_travels_by_fsdp_is_told_once():
    rows = tuple(GatherRow(f"blocks.{i}.up", "rowwise", "columnwise", "" if i else "first") for i in range(4))
    lines = printed(gathers=rows, skipped=tuple((f"blocks.{i}.up", "x") for i in range(4)))
    assert "blocks.[1-3].up x3 rowwise columnwise" in lines
    assert "blocks.0.up rowwise columnwise first" in lines


def test_layers_with_one_reason_are_together():
    skipped = (("head", "big"), ("a.0.gate", "small"), ("tail", "big"), ("a.1.gate", "small"))
    lines = printed(skipped=skipped)
    start = lines.index("head big")
    assert lines[start : start + 3] == ["head big", "tail the same", "a.*.gate x2 small"]


def test_large_matrices_are_told_unless_someone_decided_so():
    plain = tuple(PlainMatrix(f"e.{i}.w", (8, 4), "Own is no Linear", i == 3) for i in range(4))
    lines = printed(coverage=Coverage(0.0, 0.0, plain))
    assert "e.*.w x3 [8, 4] Own is no Linear" in lines


def test_brackets_in_names_are_no_markup():
    assert "experts.w1[3][bold] why" in printed(skipped=(("experts.w1[3][bold]", "why"),))
