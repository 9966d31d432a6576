"""``watch`` of experts: one of a stack in each sample. Oracles: float64 computations from tensors that the test
keeps and cuts itself, and a run that is not watched.
"""

import functools
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from experts import ENDS, EXPERTS, TOKENS, WIDTH, Experts, Mixture, offsets, parts
from face_numbers import KeptFaces, assert_numbers, train_watched
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.linear.grouped import step_of
from hybridtensor.optim import MasterWeights
from hybridtensor.subclasses.observing import observers
from hybridtensor.watching import Recording

SPECS = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "fp8_delayed", "mxfp8/nvfp4/bf16", "fp8+dequantized",
         "mxfp8+save_original_input", "nvfp4_row_scaled_fwd_mxfp8_bwd"]  # fmt: skip


class Stack(nn.Module):
    """One stack of weights."""

    def __init__(self, transposed=False):
        super().__init__()
        self.num_experts, self.is_transposed = EXPERTS, transposed
        self.w = nn.Parameter(torch.randn(EXPERTS, *((WIDTH, 96) if transposed else (96, WIDTH))) / 8)

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.w if self.is_transposed else self.w.transpose(-2, -1), offs=ends)


def tokens(device="cpu", behind=None):
    """Tokens and gradients of 96 features; rows ``behind`` are of no expert."""
    x, grad = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 96) / 100
    x[3] *= 1e-4  # some underflow
    for t in (x, grad) if behind is not None else ():
        t[behind:] = float("nan")
    return x.to(device), grad.to(device)


# -- the numbers


def of_expert(name, face, number, ends, step):
    """The face of one expert, cut out of that of all, as ``ops.groups`` says that it lies."""
    fmt, (start, stop) = face.format, parts(ends)[number]
    padded = [max(-(-(b - a) // step), 1) * step for a, b in parts(ends)]
    first = sum(padded[:number])
    by_row = name.endswith("rowwise") or face.dequantized_rowwise is not None

    def cut(scale, block):
        across, along = block
        if by_row:
            return scale[number] if across is None else scale[start:stop]
        return scale[number] if along is None else scale[:, first // along : -(-(first + stop - start) // along)]

    if name.startswith("weight"):
        return face._replace(**{f: t[number] for f, t in zip(face._fields[:3], face[:3], strict=True) if t is not None})
    per_byte = fmt.elements_per_byte
    stored = fmt.stored(stop - start) // per_byte
    qdata = face.qdata[start:stop] if by_row else face.qdata[:, first // per_byte : first // per_byte + stored]
    scale = None if face.scale is None else cut(face.scale, fmt.block)
    level = None if face.tensor_scale is None else cut(face.tensor_scale, fmt.tensor_block)
    return face._replace(qdata=qdata, scale=scale, tensor_scale=level)


@pytest.mark.parametrize("ends", [(32, 96, 96, 160), (5, 33, 40, 150), (0, 40, 40, 40)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_numbers_are_those_of_float64(spec, ends, device):
    x, grad = tokens(device, ends[-1])
    model = ht.quantize_(Stack(), spec).to(device)
    kept, samples = KeptFaces(model.w.layer), []
    observers.append(kept)
    try:
        with ht.watch(model, every=1, rows=256) as watched:
            for _ in range(EXPERTS):
                model(x.clone().requires_grad_(), offsets(ends, device)).backward(grad)
                watched.step()
                samples.append(dict(kept.faces))
    finally:
        observers.remove(kept)
    values = {"input": x.cpu(), "weight": model.w.plain.detach().cpu(), "grad_output": grad.cpu()}
    used = {role: t if role == "weight" else t[: ends[-1]] for role, t in values.items()}
    amaxes = {role: float(t.abs().max()) for role, t in used.items()}
    full = [e for e, (start, stop) in enumerate(parts(ends)) if start < stop]
    for turn, (sample, faces) in enumerate(zip(watched.samples, samples, strict=True)):
        number = next(e for i in range(EXPERTS) if (e := (turn + i) % EXPERTS) in full)
        start, stop = parts(ends)[number]
        own = {role: t[number] if role == "weight" else t[start:stop] for role, t in values.items()}
        cut = {name: of_expert(name, face, number, ends, step_of(model.w.config)) for name, face in faces.items()}
        rows = {row.operand: row for row in sample.faces}
        products = {row.product: row.statistics for row in sample.products}
        assert_numbers(cut, own, rows, products, amaxes)
        assert {row.experts for row in sample.faces} == {((number, row.statistics["sqnr"]),) for row in sample.faces}
        for row in sample.products:
            assert row.experts == ((number, row.statistics["cosine"]),)
        assert not sample.unseen


def sampled(model, *calls, every=1, rows=256, **options):
    """Samples of a step for each call."""
    with ht.watch(model, every=every, rows=rows, **options) as watched:
        for call in calls:
            call()
            watched.step()
    return watched.samples


def test_experts_take_turns_and_so_do_stretches():
    """More features than are measured at once: of each expert another stretch, once all had their turn."""
    model = ht.quantize_(Stack(), "mxfp8")
    with torch.no_grad():
        model.w[:, :, 32:] *= 1e-3
    x, _ = tokens()
    x = x.repeat(8, 1)

    def call():
        model(x.clone().requires_grad_(), offsets((300, 600, 900, 1280))).square().mean().backward()

    samples = sampled(model, *[call] * 8, rows=128)
    assert [row.experts[0][0] for s in samples for row in s.products if row.product == "output"] == [*range(4)] * 2
    for first, second in zip(samples[:4], samples[4:], strict=True):
        for mine, other in zip(first.faces, second.faces, strict=True):
            same = mine.statistics == other.statistics
            assert same == (mine.operand not in ("input.rowwise", "grad_output.rowwise"))
            assert mine.where == f"w[{mine.experts[0][0]}]"


def test_all_experts_of_microbatches_are_told():
    """Where the next one has no tokens, another one has its turn: sums are of both."""
    model, (x, grad) = ht.quantize_(Stack(), "mxfp8"), tokens()

    def call(*every):
        for ends in every:
            model(x.clone().requires_grad_(), offsets(ends)).backward(grad)

    one, other = (40, 80, 120, 160), (0, 50, 100, 160)
    first, second = (sampled(model, lambda ends=ends: call(ends))[0] for ends in (one, other))
    (both,) = sampled(model, lambda: call(one, other))
    for row, *apart in zip(both.faces, first.faces, second.faces, strict=True):
        assert row.experts == apart[0].experts + apart[1].experts
        assert [number for number, _ in row.experts] == [0, 1]
        assert row.worst == min(row.experts, key=lambda one: one[1])[0]
        assert row.statistics["cur_amax"] == max(a.statistics["cur_amax"] for a in apart)
        low, high = sorted(a.statistics["sqnr"] for a in apart)
        assert low < row.statistics["sqnr"] < high
    for row, *apart in zip(both.products, first.products, second.products, strict=True):
        assert row.experts == apart[0].experts + apart[1].experts
        low, high = sorted(a.statistics["cosine"] for a in apart)
        assert low < row.statistics["cosine"] < high


def test_without_tokens_nothing_is_measured():
    model, (x, grad) = ht.quantize_(Stack(), "mxfp8"), tokens()
    (sample,) = sampled(model, lambda: model(x.requires_grad_(), offsets((0, 0, 0, 0))).backward(grad))
    assert not sample.faces
    assert not sample.products
    assert sample.unseen == (("w", "output: no expert had tokens"),)


def test_stored_the_other_way():
    plain, (x, grad) = Stack(), tokens()
    turned = Stack(transposed=True)
    with torch.no_grad():
        turned.w.copy_(plain.w.transpose(-2, -1))
    found = []
    for model in (plain, turned):
        for persistent in (False, True):
            model = ht.quantize_(model, "mxfp8", persistent=persistent)
            call = lambda m=model: m(x.clone().requires_grad_(), offsets(ENDS[0])).backward(grad)  # noqa: E731
            found.append(sampled(model, call)[0])
    for sample in found[1:]:
        assert sample.scalars() == pytest.approx(found[0].scalars())  # sums in another order
    assert len(found[0].faces) == 6


def test_batches_and_products_of_one_expert():
    """Of a product with one of the weights nobody says which it is: it counts, without a number."""
    model, (x, grad) = ht.quantize_(Stack(), "mxfp8"), tokens()
    ends = (40, 80, 120, 160)

    def batched():
        y = torch.bmm(x.clone().requires_grad_().view(EXPERTS, 40, WIDTH), model.w.transpose(-2, -1))
        y.backward(grad.view(EXPERTS, 40, -1))

    def looped():
        for e, (start, stop) in enumerate(parts(ends)):
            F.linear(x[start:stop].clone().requires_grad_(), model.w[e]).backward(grad[start:stop])

    def grouped():
        model(x.clone().requires_grad_(), offsets(ends)).backward(grad)

    (wanted,), (same,), (loop,) = (sampled(model, call) for call in (grouped, batched, looped))
    assert same == wanted
    every = sampled(model, *[grouped] * EXPERTS)
    for number, row in enumerate(loop.products):
        assert row.experts == ()
        assert row.where == "w"
        cosines = [sample.products[number].statistics["cosine"] for sample in every]
        assert min(cosines) < row.statistics["cosine"] < max(cosines)


# -- the loop


def data(seed, device="cpu"):
    return torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


train = functools.partial(train_watched, data)


def mixture(spec, **options):
    torch.manual_seed(0)
    return ht.quantize_(Mixture(), spec, **options)


@pytest.mark.parametrize("spec", SPECS)
def test_a_watched_run_is_one_that_is_not(spec, device):
    model, twin = mixture(spec).to(device), mixture(spec).to(device)
    with ht.watch(model, every=2, rows=128) as watched:
        train(model, 4, watched)
    train(twin, 4)
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert [{row.layer for row in sample.products} for sample in watched.samples] == [
        {f"experts.{name}" for name in ("w1", "w2", "w3")}
    ] * 2
    assert not [sample.unseen for sample in watched.samples if sample.unseen]


def test_persistent_experts():
    model, twin = (mixture("mxfp8", persistent=True) for _ in range(2))
    optimizers = [MasterWeights(torch.optim.SGD, m.parameters(), lr=1e-2) for m in (model, twin)]
    with ht.watch(model, every=1) as watched:
        train(model, 3, optimizer=optimizers[0])
    train(twin, 3, optimizer=optimizers[1])
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert {row.product for row in watched.samples[-1].products} == {"output", "grad_input", "grad_weight"}
    frozen = mixture("mxfp8")
    frozen.experts.requires_grad_(False)
    frozen = ht.quantize_(frozen, "mxfp8", persistent=True)
    x = data(0).requires_grad_()
    (sample,) = sampled(frozen, lambda: frozen(x).sum().backward())
    assert sample.unseen == tuple(
        (f"experts.{name}", "output: the values of its weight are not known in whole blocks on this rank")
        for name in ("w1", "w3", "w2")
    )
    assert {row.operand for row in sample.faces} == {"input.rowwise", "grad_output.rowwise"}


def test_compiled_experts_run_eagerly_in_sampled_steps_alone():
    model, ran = ht.quantize_(Experts(), "mxfp8"), []

    def backend(graph, _):
        return lambda *args: ran.append(1) or graph.forward(*args)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(TOKENS, WIDTH)

    def call(ends):
        ran.clear()
        compiled(x.clone().requires_grad_(), offsets(ends)).square().mean().backward()
        return bool(ran)

    with ht.watch(compiled, every=2) as watched:
        for step, ends in enumerate(ENDS[:4]):
            assert call(ends) == (step % 2 == 1)
            watched.step()
    assert [row.experts[0][0] for s in watched.samples for row in s.products if row.product == "output"] == [0] * 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant):
    model, plain = mixture("mxfp8"), mixture("mxfp8")

    def checkpointed(x):
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    with ht.watch(model, every=1) as watched, ht.watch(plain, every=1) as other:
        train(model, 2, forward=checkpointed)
        train(plain, 2)
    mine, wanted = watched.samples[1].scalars(), other.samples[1].scalars()
    # the plain input of the first layers asks for no gradient there
    assert {name: mine[name] for name in wanted} == pytest.approx(wanted, nan_ok=True)


# -- alarms


def alarmed(change, ends=(40, 80, 120, 160), **options):
    """What is told when one expert, which is not measured, has a value that is not finite."""
    model, (x, grad), told = ht.quantize_(Experts(), "mxfp8"), tokens(), []
    change(model, x)
    call = lambda: model(x.requires_grad_(), offsets(ends)).backward(grad[:, :WIDTH].contiguous())  # noqa: E731
    return told, sampled(model, call, alarm=told.append, **options)[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_alarms_name_the_expert(value):
    def spoil_tokens(model, x):
        x[90] = value

    def spoil_weight(model, x):
        with torch.no_grad():
            model.w3[3, 5, 7] = value

    told, sample = alarmed(spoil_tokens)
    assert told == ["watch: w1[2]: the face input.rowwise (mxfp8_e4m3) is not finite, in step 0"]
    row = sample.faces[0]
    assert (row.layer, row.operand) == ("w1", "input.rowwise")
    assert [number for number, _ in row.experts] == [0, 2]
    assert row.experts[0][1] > 25
    assert math.isnan(row.experts[1][1])
    told, _ = alarmed(spoil_weight)
    assert told == ["watch: w3[3]: the face weight.rowwise (mxfp8_e4m3) is not finite, in step 0"]
    told, _ = alarmed(spoil_tokens, ends=(40, 80, 90, 90))
    assert not told  # that row is of no expert


# -- where it goes


def test_recordings_and_sinks(tmp_path, capsys):
    model, told = mixture("nvfp4"), []
    with ht.watch(model, every=2, sinks=[tmp_path / "log.jsonl", told.append]) as watched:
        train(model, 3, watched)
    recording = watched.recording()
    assert Recording.load(recording.save(tmp_path / "run.json")) == recording
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[1])
    assert line["products"][0]["experts"] == [
        [number, pytest.approx(cosine)] for number, cosine in told[1].products[0].experts
    ]
    watched.show()
    assert re.search(r"smallest cosine of a product: .*, experts\.w\d\[1\] ", capsys.readouterr().out)
    numbers = dict.fromkeys(ht.watching.NAMES, 1.0)
    bad = told[0]._replace(
        faces=(told[0].faces[0].__class__(0, "w", "input.rowwise", "fp8", numbers, ((1, math.nan),)),)
    )
    run = Recording(1, {}, {}, (), (bad,))
    (again,) = Recording.load(run.save(tmp_path / "bad.json")).samples[0].faces
    assert math.isnan(again.experts[0][1])
    assert "NaN" not in (tmp_path / "bad.json").read_text()  # which is no JSON


def test_the_page_shows_stacks(tmp_path):
    model = mixture("mxfp8")
    with ht.watch(model, every=1, rows=128) as watched:
        train(model, 6, watched)
    page = ht.report(watched, tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert data["layers"] == ["experts.w1", "experts.w3", "experts.w2"]
    for column, sample in enumerate(watched.samples):
        for row in sample.products:
            got = data["values"]["cosine"][row.product][data["layers"].index(row.layer)][column]
            assert got == pytest.approx(row.statistics["cosine"], rel=1e-3)
    table = page.split("The worst experts</h2>")[1].split("</table>")[0]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert len(rows) == 7  # nobody asks for the gradient of the model's input
    assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows)
    of_output = next(row for row in rows if row[:2] == ["experts.w1", "output"])
    latest = {e: (c, s.step) for s in watched.samples for e, c in s.products[0].experts}
    worst = min(latest, key=latest.get)
    assert of_output[2:] == [str(worst), f"{latest[worst][0]:.6f}", str(latest[worst][1]), "4"]
    assert re.search(r"<td>experts\.w\d\[1\]</td><td>input\.rowwise</td>", page)  # the expert of the sixth step
    linear = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "mxfp8")
    with ht.watch(linear, every=1) as watched:
        train(linear, 2, watched)
    page = ht.report(watched, tmp_path / "page.html").read_text()
    assert "<!--" not in page
    assert "The worst experts" not in page
