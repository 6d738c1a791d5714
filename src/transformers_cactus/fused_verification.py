"""Verification on GPUs in two launches, for rules that raise the drafted token and scale the others.

What PyTorch needs for it, a dozen passes over rows and copies of them, is two kernels here, and nothing of the size of
a row is written:

1. `fused_rows` reduces every row of both models to its log-sum-exp. With it, acceptance is arithmetic on one number
   per drafted token, which the rule itself does as everywhere else: a rule needs no kernel of its own.
2. `fused_next_token` reads one row of each model again for every sequence, forms the residual as it goes, and samples
   from it.

Random numbers are counter-based (Philox): the key is drawn from PyTorch's generator, on the device, and the counter is
the sequence and the token. So the same generator state gives the same tokens, and nothing waits for the device.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .acceptance import AcceptanceRule, GammaRule
from .rows import Rows

DEVICES = ("cuda",)
"""Types of devices that the kernels run on. ROCm's are called so too. Triton's interpreter also runs on the CPU."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Scores that the kernels read."""

NORMALIZED_CHUNK, RACED_CHUNK = 4096, 1024
"""Tokens that a program of either kernel reads: few enough that one row keeps many multiprocessors busy."""


def fusable(rule: AcceptanceRule, verifier_scores: Tensor, draft_scores: Tensor | None) -> GammaRule | None:
    """The rule, if the kernels verify a block with it; `None` where PyTorch does.

    They read scores in at most single precision, on a device that they run on, and need a [`GammaRule`] that recovers
    as that class does. Its `gamma` can be any.
    """
    scores = [verifier_scores] if draft_scores is None else [verifier_scores, draft_scores]
    if (
        isinstance(rule, GammaRule)
        and type(rule).recovery_weights is GammaRule.recovery_weights
        and all(s.device.type in DEVICES and s.dtype in DTYPES and not s.requires_grad for s in scores)
        and _usable(verifier_scores.device)
    ):
        return rule
    return None


@cache
def _usable(device: torch.device) -> bool:
    """Whether the kernels run on a device: Triton is installed, finds a compiler, and knows the device."""
    try:
        from . import kernels
    except ImportError:
        return False
    try:
        _normalize(kernels, torch.zeros(1, 1, 1, device=device), None)
    except Exception as error:
        # Whatever it is, PyTorch can do without the kernels; only more slowly, which the user should know.
        message = f"The verification runs in PyTorch alone, as Triton's kernels do not run on {device}: {error!r}."
        warnings.warn(message, stacklevel=4)
        return False
    return True


def fused_rows(verifier_scores: Tensor, draft_scores: Tensor | None) -> tuple[Rows, Rows | None]:
    """Both models' rows, with the log-sum-exp of each computed in one launch.

    Args:
        verifier_scores (`torch.Tensor` of shape `[batch, block + 1, vocab]`): The verifier's scores.
        draft_scores (`torch.Tensor` of shape `[batch, block, draft_vocab]` or `None`): The draft's scores.

    Returns:
        [`Rows`] of the same shapes.
    """
    from . import kernels

    verifier, draft = _normalize(kernels, verifier_scores, draft_scores)
    return Rows(verifier_scores, verifier), None if draft_scores is None else Rows(draft_scores, draft)


def _normalize(kernels: Any, verifier: Tensor, draft: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp of every row, `[batch, positions]`; NaN where a row is no distribution."""
    shapes = [_chunked(scores, NORMALIZED_CHUNK) for scores in (verifier, draft) if scores is not None]
    programs = [batch * positions * chunks for batch, positions, chunks in shapes]
    chunks = torch.empty(sum(programs), dtype=torch.float32, device=verifier.device)
    # Without a draft no program reads what stands in its place.
    second = verifier if draft is None else draft
    with torch.cuda.device_of(verifier):
        kernels.normalize_chunks[(sum(programs),)](
            verifier,
            *verifier.stride(),
            *verifier.shape[1:],
            programs[0],
            second,
            *second.stride(),
            *second.shape[1:],
            chunks,
            CHUNK=NORMALIZED_CHUNK,
            num_warps=8,
        )
    totals = [part.view(shape).logsumexp(-1) for part, shape in zip(chunks.split(programs), shapes, strict=True)]
    normalizers = [torch.where(total.isfinite(), total, torch.nan) for total in totals]
    return normalizers[0], normalizers[1] if draft is not None else None


def fused_next_token(
    draft_tokens: Tensor,
    accepted: Tensor,
    block_lengths: Tensor | int,
    verifier: Rows,
    draft: Rows | None,
    rule: GammaRule,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Samples a recovery token where a drafted token was rejected, and a bonus token elsewhere, in one launch.

    Args:
        draft_tokens (`torch.LongTensor` of shape `[batch, block]`): The drafted tokens.
        accepted (`torch.LongTensor` of shape `[batch]`): Accepted drafted tokens of each sequence.
        block_lengths (`torch.LongTensor` of shape `[batch]` or `int`): Drafted tokens of each sequence.
        verifier ([`Rows`] of shape `[batch, block + 1, vocab]`): `q`, from `fused_rows`.
        draft ([`Rows`] of shape `[batch, block, draft_vocab]` or `None`): `p`, from `fused_rows`.
        rule ([`GammaRule`]): The rule.
        generator (`torch.Generator`, *optional*): Source of the kernel's seed, on the device of the scores.

    Returns:
        `torch.LongTensor` of shape `[batch]`, the tokens, and `torch.LongTensor` of shape `[batch]`, as
        [`Verification.invalid`].
    """
    from . import kernels

    scores, block = verifier.scores, draft_tokens.shape[1]
    assert verifier.log_normalizer is not None
    normalizers = verifier.log_normalizer.gather(1, accepted[:, None])[:, 0]
    invalid = normalizers.isnan().long()
    rejected_tokens, scales, draft_normalizers = (
        torch.full_like(accepted, -1),
        torch.ones_like(normalizers),
        normalizers,
    )
    if block:
        rejected = accepted < block_lengths
        # A sequence whose whole block was accepted has no rejected token: `where` drops what any index gives there.
        at = accepted.clamp(max=block - 1)
        tokens = draft_tokens.gather(1, at[:, None])[:, 0]
        rejected_tokens = torch.where(rejected, tokens, -1)
        log_q_n = verifier.first(block).log_prob(draft_tokens).gather(1, at[:, None])[:, 0]
        scales = torch.where(rejected, rule.at(at).scale_of_others(log_q_n.exp()), 1.0)
        if draft is not None and draft.log_normalizer is not None:
            draft_normalizers = draft.log_normalizer.gather(1, at[:, None])[:, 0]
            invalid = torch.where(rejected & draft_normalizers.isnan() & (invalid == 0), 2, invalid)

    batch, _, chunks = _chunked(scores, RACED_CHUNK)
    keys = torch.empty(batch, chunks, dtype=torch.float32, device=scores.device)
    winners = torch.empty(batch, chunks, dtype=torch.long, device=scores.device)
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=scores.device)
    has_draft = bool(block) and draft is not None
    second = scores if draft is None else draft.scores
    with torch.cuda.device_of(scores):
        kernels.race_chunks[(batch * chunks,)](
            scores,
            *scores.stride(),
            scores.shape[-1],
            second,
            *second.stride(),
            second.shape[-1],
            accepted,
            rejected_tokens,
            scales,
            normalizers,
            draft_normalizers,
            seed,
            keys,
            winners,
            HAS_DRAFT=has_draft,
            CHUNK=RACED_CHUNK,
        )
    return winners.gather(1, keys.argmax(1, keepdim=True))[:, 0], invalid


def _chunked(scores: Tensor, chunk: int) -> tuple[int, int, int]:
    """Sequences, positions, and chunks of a row."""
    batch, positions, vocab = scores.shape
    return batch, positions, -(-vocab // chunk)
