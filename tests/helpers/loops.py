"""Training loops whose results two models have in common, bit by bit."""

import torch

import hybridtensor as ht


def same(mine, theirs):
    """Whether as many tensors are equal, bitwise."""
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def optimizer_of(model, persistent=True):
    """An optimizer that remembers its steps; persistent weights are stepped in high precision."""
    options = {"lr": 0.5, "momentum": 0.5}
    if not persistent:
        return torch.optim.SGD(model.parameters(), **options)
    return ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), **options)


def steps(model, optimizer, batch, *, count=3, first=0, run=None, still=(), weights=True):
    """Train, accumulating the gradients of two batches in the first step; return outputs and gradients.

    Args:
        model: What is trained.
        optimizer: Its optimizer.
        batch: From a number to an input.
        count: How many steps.
        first: The number of the first one.
        run: What is called, if not the model.
        still: Steps that leave the weights as they are; the state of quantizers advances.
        weights: Whether gradients of parameters are returned, too: shards have none of the whole.
    """
    found = []
    for step in range(first, first + count):
        for again in range(2 if step == first else 1):
            x = batch(2 * step + again).requires_grad_()
            y = (model if run is None else run)(x)
            y.square().mean().backward()
        found += [y.detach(), x.grad]
        found += [p.grad.clone() for p in model.parameters()] if weights else []
        if step not in still:
            optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    return found


def losses(model, optimizer, loss_of, count=12):
    """Train with what ``loss_of()`` returns, and return all of it."""
    found = []
    for _ in range(count):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        found.append(loss.item())
    return found


DRAWS = 32


def assert_unbiased(totals, squares, exact):
    """Compare the means of ``DRAWS`` drawn tensors, in float64, with exact ones, by their measured errors.

    Args:
        totals: Sums of what was drawn, of each kind of tensor.
        squares: Sums of its squares.
        exact: What the means have to be.
    """
    for total, square, wanted in zip(totals, squares, exact, strict=True):
        mean = total / DRAWS
        error = ((square / DRAWS - mean**2) / (DRAWS - 1)).sqrt()
        chosen = error > 0  # not of groups without tokens
        off = ((mean - wanted) / error)[chosen]
        assert torch.equal(mean[~chosen], wanted[~chosen])
        assert 0.9 < off.square().mean() < 1.2  # 31 degrees of freedom: 31 / 29
        assert off.mean().abs() < 0.05


def watched_sample(model, run):
    """Return what is measured of a step, in which ``run()`` runs the model."""
    with ht.watch(model, every=1, rows=128) as watched:
        run()
        watched.step()
    (sample,) = watched.samples
    return sample
