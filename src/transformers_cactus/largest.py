"""The largest scores of a row, as Python numbers.

On a CPU, `topk` over a vocabulary takes longer than anything else that a round does outside the models. Here the row
is dealt into groups: as many of them as are asked for have a largest score of at least some threshold, so at least as
many scores have. One pass finds the groups' largest, another the few scores that reach the threshold.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

GROUPS = 512
"""Score `i` of a row belongs to the group `i % GROUPS`."""


def largest(scores: Tensor, count: int) -> tuple[list[list[float]], list[list[int]]]:
    """`scores.topk(count)`.

    Args:
        scores (`torch.Tensor` of shape `[rows, vocab]`): Scores on a CPU, in float32.
        count (`int`): How many to find in each row, at most `vocab`.

    Returns:
        Two lists of `count` numbers for each row: the scores, in descending order, and their places. Of places that
        tie for the last one, some are found; NaN counts as the largest.
    """
    vocab = scores.shape[1]
    # With few groups for each one that is asked for, or few scores in a group, too many reach the threshold.
    if 4 * count > GROUPS or vocab < 4 * GROUPS:
        best = scores.topk(count)
        return best.values.tolist(), best.indices.tolist()
    values, places = [], []
    behind = vocab % GROUPS
    for number, row in enumerate(scores.detach().numpy()):
        best_of = row[: vocab - behind].reshape(-1, GROUPS).max(0)
        if behind:
            np.maximum(best_of[:behind], row[-behind:], out=best_of[:behind])
        best_of.partition(GROUPS - count)
        if math.isnan(best_of[-count:].max()):
            # No comparison finds NaN.
            at = scores[number].topk(count).indices.numpy()
        else:
            found = (row >= best_of[-count]).nonzero()[0]
            at = found[row[found].argsort()[: -count - 1 : -1]]
        values.append(row[at].tolist())
        places.append(at.tolist())
    return values, places
