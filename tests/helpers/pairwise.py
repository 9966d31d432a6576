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


def most_pairs(found, count):
    """Return ``count`` names whose features make as many pairs as a greedy choice finds, each pair in one of them.

    Args:
        found: The features of each name, which are hashable and can be sorted.
        count: How many names.
    """
    pairs = {name: set(itertools.combinations(sorted(features), 2)) for name, features in found.items()}
    chosen = []
    while pairs and len(chosen) < count:
        best = max(pairs, key=lambda name: len(pairs[name]))  # the first of the best
        met = pairs.pop(best)
        chosen.append(best)
        for others in pairs.values():
            others -= met
    return chosen
