"""Few combinations instead of all: most defects of two things together need just those two."""

import itertools


def pairwise(*factors):
    """Return rows of one value of each factor, such that every two values of different factors are in one of them.

    The same rows every time. A greedy choice: each row begins with two values that have not met, and takes of every
    other factor the value that meets most for the first time.

    Args:
        factors: Two or more lists of values, which may repeat and need not be hashable.
    """
    sizes = [range(len(factor)) for factor in factors]
    columns = list(itertools.combinations(range(len(factors)), 2))
    missing = dict.fromkeys((a, i, b, j) for a, b in columns for i in sizes[a] for j in sizes[b])
    rows = []
    while missing:
        a, i, b, j = next(iter(missing))
        row = {a: i, b: j}
        for c in range(len(factors)):
            if c not in row:
                row[c] = max(sizes[c], key=lambda k, c=c: sum(_pair(c, k, d, row[d]) in missing for d in row))
        for a, b in columns:
            missing.pop((a, row[a], b, row[b]), None)
        rows.append(tuple(factor[row[c]] for c, factor in enumerate(factors)))
    return rows


def _pair(a, i, b, j):
    return (a, i, b, j) if a < b else (b, j, a, i)
