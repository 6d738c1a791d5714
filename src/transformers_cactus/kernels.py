"""The two Triton kernels of `fused_verification`. A program of either reads one chunk of one row of scores.

Scores may have any strides and are read in float32. What the programs find in their chunks is small, and the host
side puts it together with a few operations of PyTorch.
"""

from __future__ import annotations

# transformers refuses a repository with a module that imports what is not installed, unless it does so in a `try`.
try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The kernels are written in Triton, which comes with torch's builds for GPUs.") from error

SMALLEST_WEIGHT = tl.constexpr(2.0**-126)
"""The smallest normal number of float32. GPUs take what lies below it for 0, and so do the kernels."""

RANK = tl.constexpr(128.0)
"""More than any two keys of one rank differ: `log(weight)` is in [-88, 0], the Gumbel noise in [-3, 23]."""


# Without the numbers that change as sequences leave the batch: each value would be compiled anew.
@triton.jit(do_not_specialize=["verifier_positions", "verifier_programs", "draft_positions"])
def normalize_chunks(
    verifier,
    verifier_sequence_stride,
    verifier_position_stride,
    verifier_token_stride,
    verifier_positions,
    verifier_vocab,
    verifier_programs,
    draft,
    draft_sequence_stride,
    draft_position_stride,
    draft_token_stride,
    draft_positions,
    draft_vocab,
    results,
    CHUNK: tl.constexpr,
):
    """Log-sum-exp of every chunk of every row of both models: first all of the verifier's, then all of the draft's."""
    program = tl.program_id(0)
    if program < verifier_programs:
        result = _log_sum_exp(
            verifier,
            verifier_sequence_stride,
            verifier_position_stride,
            verifier_token_stride,
            verifier_positions,
            verifier_vocab,
            program,
            CHUNK,
        )
        tl.store(results + program, result)
    else:
        result = _log_sum_exp(
            draft,
            draft_sequence_stride,
            draft_position_stride,
            draft_token_stride,
            draft_positions,
            draft_vocab,
            program - verifier_programs,
            CHUNK,
        )
        tl.store(results + program, result)


@triton.jit
def _log_sum_exp(
    scores, sequence_stride, position_stride, token_stride, positions, vocab, program, CHUNK: tl.constexpr
):
    chunks = tl.cdiv(vocab, CHUNK)
    row = (program // chunks).to(tl.int64)
    tokens = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    start = scores + (row // positions) * sequence_stride + (row % positions) * position_stride
    inside = tokens < vocab
    values = tl.load(start + tokens.to(tl.int64) * token_stride, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(values)
    # A chunk of nothing but -inf must not become -inf - (-inf) = NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    return shift + tl.log(tl.sum(tl.exp(values - shift)))


@triton.jit
def race_chunks(
    verifier,
    verifier_sequence_stride,
    verifier_position_stride,
    verifier_token_stride,
    vocab,
    draft,
    draft_sequence_stride,
    draft_position_stride,
    draft_token_stride,
    draft_vocab,
    positions,
    rejected_tokens,
    scales,
    verifier_normalizers,
    draft_normalizers,
    seed,
    keys,
    winners,
    HAS_DRAFT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token with the highest key of every chunk of one row per sequence, and that key.

    The key is `log(weight)` plus Gumbel noise, so that the winner over a row is a sample in proportion to the weights.
    These are the residual, `max(scale * q - p, 0)`, and 0 for the rejected token. Where it is 0, the token ranks
    behind all that have a residual with the weight `q`, and the rejected token behind all others: so the fallbacks of
    an empty residual come out of the same race. Without a rejected token (-1), `scale` is 1, `p` is not read, and the
    residual is `q`.
    """
    chunks = tl.cdiv(vocab, CHUNK)
    sequence = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    rejected = tl.load(rejected_tokens + sequence)
    position = tl.load(positions + sequence)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    offsets = tokens.to(tl.int64)

    row = verifier + sequence.to(tl.int64) * verifier_sequence_stride + position * verifier_position_stride
    scores = tl.load(row + offsets * verifier_token_stride, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    q = tl.exp(scores - tl.load(verifier_normalizers + sequence))
    residual = q * tl.load(scales + sequence)
    if HAS_DRAFT:
        covered = (tokens < vocab) & (tokens < tl.where(rejected >= 0, draft_vocab, 0))
        row = draft + sequence.to(tl.int64) * draft_sequence_stride + position * draft_position_stride
        scores = tl.load(row + offsets * draft_token_stride, mask=covered, other=float("-inf")).to(tl.float32)
        residual -= tl.where(covered, tl.exp(scores - tl.load(draft_normalizers + sequence)), 0.0)

    first = (residual >= SMALLEST_WEIGHT) & (tokens != rejected)
    weight = tl.where(first, residual, q)
    rank = tl.where(first, 0.0, tl.where(tokens == rejected, -2 * RANK, -RANK))
    # NaN, of a row that is no distribution, is at least nothing.
    entered = weight >= SMALLEST_WEIGHT
    key = tl.log(tl.where(entered, weight, 1.0)) + gumbel_noise(tl.load(seed), sequence, chunk, CHUNK) + rank
    best, winner = tl.max(tl.where(entered, key, float("-inf")), axis=0, return_indices=True)
    tl.store(keys + tl.program_id(0), best)
    tl.store(winners + tl.program_id(0), chunk * CHUNK + winner)


@triton.jit
def gumbel_noise(seed, sequence, chunk, CHUNK: tl.constexpr):
    """Gumbel noise for a chunk, `-log(E)` with `E` from the unit exponential distribution.

    Philox gives four 32-bit words for each counter, and each word is the noise of one token. Tokens win with small
    `E`: it is made from the distance of a uniform number from 1, which is known to 2^-32, not from the number itself,
    which float32 rounds to 2^-24 there.
    """
    counters = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    a, b, c, d = tl.philox(seed, counters, sequence, 0, 0)
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [CHUNK])
    # In the middle of its cell of 2^-32, so never 0; large ones round up to 1, which has no logarithm.
    distance = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # -log(1 - x): by its series where 1 - x would round x away.
    x = tl.minimum(distance, 0.0625)
    series = x * (1 + x * (1 / 2 + x * (1 / 3 + x * (1 / 4 + x * (1 / 5)))))
    return -tl.log(tl.where(distance < 0.0625, series, -tl.log(1 - distance)))
