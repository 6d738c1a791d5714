"""The kernels, against PyTorch in float64: on a GPU where there is one, else in Triton's interpreter (see conftest).

The interpreter takes some 30 ms for a program, whatever its size, so samples are few there and rows may be long.
"""

import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

import chi_square
import transformers_cactus
from test_verification import BAD_ROWS, OutputSizes
from transformers_cactus import Cactus, CactusExact, GammaRule, Lenience, Speculative, TopK, fused_verification, verify
from transformers_cactus.kernels import gumbel_noise
from transformers_cactus.rules.f_divergences import TotalVariation
from transformers_cactus.verification import accept_tokens

# The interpreter's NumPy warns of -inf - (-inf) and log(0), which the kernels meet and mean.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK = fused_verification.RACED_CHUNK


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    monkeypatch.setattr(fused_verification, "DEVICES", (DEVICE.type,))


@dataclass(frozen=True)
class Halfway(GammaRule):
    """A user's own rule."""

    def gamma(self, q_n):
        return torch.where(q_n > 0, (q_n + 1) / 2, q_n)


def seeded(seed=0):
    return torch.Generator(DEVICE).manual_seed(seed)


def scores(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=seeded(seed), device=DEVICE)


@triton.jit
def _store_noise(result, seed, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    noise = gumbel_noise(tl.load(seed), program // 2, program % 2, CHUNK)
    tl.store(result + program * CHUNK + tl.arange(0, CHUNK), noise)


def noise_of(seed, chunk):
    """The noise of two sequences and two chunks, `[2, 2 * chunk]`."""
    result = torch.empty(4 * chunk, device=DEVICE)
    _store_noise[(4,)](result, seed, CHUNK=chunk)
    return result.view(2, 2 * chunk)


def reference(tokens, verifier, draft, rule, lengths, seed):
    """What must come out, from the same random numbers: every decision in float64, and argmax of log-weight and noise.

    For two sequences, and rows of at most two chunks.
    """
    wide = None if draft is None else draft.double()
    outcome = verify(tokens, verifier.double(), wide, rule, block_lengths=lengths, generator=seeded(seed))
    generator = seeded(seed)
    torch.rand(len(tokens), tokens.shape[1] + 1, generator=generator, device=DEVICE)
    noise = noise_of(torch.randint(2**63 - 1, (1,), generator=generator, device=DEVICE), CHUNK)
    next_tokens = []
    for row, at in enumerate(outcome.accepted.tolist()):
        weights = verifier[row, at].double().softmax(-1)[None]
        vocab = weights.shape[-1]
        if at < (tokens.shape[1] if lengths is None else int(lengths[row])):
            p = None
            if wide is not None:
                p = torch.zeros_like(weights)
                shared = min(vocab, wide.shape[-1])
                p[0, :shared] = wide[row, at].softmax(-1)[:shared]
            where = torch.full((len(tokens),), at, device=DEVICE)
            own = rule.select(torch.tensor([row], device=DEVICE)).at(where[:1]) if rule.batch_size else rule.at(where)
            weights = own.recovery_weights(tokens[row, at][None], weights, p)
        next_tokens.append(int((weights[0].log() + noise[row, :vocab]).argmax()))
    return outcome._replace(next_token=torch.tensor(next_tokens, device=DEVICE))


def check(tokens, verifier, draft, rule, lengths=None, seed=0):
    expected = reference(tokens, verifier, draft, rule, lengths, seed)
    found = verify(tokens, verifier, draft, rule, block_lengths=lengths, generator=seeded(seed))
    inside = torch.arange(tokens.shape[1], device=DEVICE) < (tokens.shape[1] if lengths is None else lengths[:, None])
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.next_token, expected.next_token)
    assert torch.equal(found.accepted_losslessly & inside, expected.accepted_losslessly & inside)
    assert torch.equal(found.invalid, expected.invalid)
    difference = (found.divergence - expected.divergence).masked_fill(~inside, 0)
    assert difference.abs().max() < 2e-5
    return found


def drafted_from(draft, seed=0):
    return torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=seeded(seed)).view(draft.shape[:2])


@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 1024, 1025, 2047])
@pytest.mark.parametrize("rule", [Speculative(), Cactus(0.3), CactusExact(0.3), Lenience(2.0), Halfway()], ids=repr)
def test_decides_and_samples_as_in_float64(rule, vocab):
    verifier, draft = scores(2, 3, vocab), scores(2, 2, vocab, seed=1)
    check(drafted_from(draft), verifier, draft, rule, seed=vocab)


def test_decisions_of_many_blocks():
    """One launch of the first kernel, and many random numbers."""
    verifier, draft = scores(12, 4, 50), scores(12, 3, 50, seed=1)
    tokens = drafted_from(draft)
    rule, seen = CactusExact(0.2), set()
    rows, draft_rows = fused_verification.fused_rows(verifier, draft)
    for seed in range(50):
        uniforms = torch.rand(12, 4, generator=seeded(seed), device=DEVICE)[:, :3]
        accepted = accept_tokens(tokens, rows.first(3), draft_rows, rule, uniforms).long().cumprod(-1).sum(-1)
        wide = verify(tokens, verifier.double(), draft.double(), rule, generator=seeded(seed))
        assert torch.equal(accepted, wide.accepted)
        seen |= set(accepted.tolist())
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_in_float32(dtype):
    verifier, draft = scores(2, 3, 900).to(dtype), scores(2, 2, 900, seed=1).to(dtype)
    for seed in range(3):
        check(drafted_from(draft.float()), verifier, draft, Cactus(0.2), seed=seed)


@pytest.mark.parametrize("draft_vocab", [600, 1100])
def test_vocabularies_of_different_sizes(draft_vocab):
    verifier, draft = scores(2, 3, 900), scores(2, 2, draft_vocab, seed=1)
    for seed in range(3):
        check(drafted_from(draft[..., :600]), verifier, draft, Speculative(), seed=seed)


def test_rows_with_any_strides():
    whole, draft = scores(2, 9, 1500), scores(1500, 2, 2, seed=1).permute(1, 2, 0)
    assert not whole[:, -3:].is_contiguous() and draft.stride(-1) != 1
    tokens = drafted_from(draft)
    for seed in range(3):
        check(tokens, whole[:, -3:], draft, Cactus(0.2), seed=seed)
    check(tokens, whole[:, -3:].transpose(1, 2).contiguous().transpose(1, 2), draft, Cactus(0.2))
    check(tokens, whole[:1, -3:].expand(2, -1, -1), draft, Cactus(0.2))


def test_recovery_without_a_draft_distribution():
    verifier = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]], device=DEVICE).repeat(2, 1, 1)
    tokens = torch.tensor([[0], [1]], device=DEVICE)
    recovered = []
    for seed in range(16):
        found = check(tokens, verifier, None, Cactus(0.01), seed=seed)
        recovered += [
            (int(t), int(n)) for t, n, a in zip(tokens, found.next_token, found.accepted, strict=True) if a == 0
        ]
    assert len(recovered) > 12 and {drafted for drafted, _ in recovered} == {0, 1}
    assert all(drafted != following for drafted, following in recovered)


def test_recovery_with_a_large_budget():
    # The other tokens are scaled to a half, so that many of them are covered by the draft.
    verifier, draft = scores(2, 3, 40), scores(2, 2, 40, seed=1)
    tokens = verifier[:, :2].topk(4).indices[..., 3]
    draft = draft.scatter(-1, tokens[..., None], 9.0)
    rejected = sum(int((check(tokens, verifier, draft, Cactus(1.0), seed=s).accepted < 2).sum()) for s in range(12))
    assert rejected > 12


def test_parameters_per_sequence_and_position():
    verifier, draft = scores(2, 4, 30), scores(2, 3, 30, seed=1)
    tokens = drafted_from(draft)
    check(tokens, verifier, draft, Cactus(torch.tensor([0.0, 0.4], device=DEVICE)))
    deltas = torch.tensor([[0.0, 0.5, 1.0], [0.2, 0.0, 0.1]], device=DEVICE)
    planned = Cactus(0.0).with_deltas(deltas)
    for seed in range(4):
        found = verify(tokens, verifier, draft, planned, generator=seeded(seed))
        wide = verify(tokens, verifier.double(), draft.double(), planned, generator=seeded(seed))
        assert torch.equal(found.accepted, wide.accepted)


def test_blocks_of_different_lengths():
    verifier = scores(2, 4, 5)
    lengths = torch.tensor([1, 2], device=DEVICE)
    beyond = torch.arange(3, device=DEVICE) >= lengths[:, None]
    # Certain to be accepted, so that a block ends by its length.
    draft = verifier[:, :-1].clone()
    draft[beyond], verifier[:, 1:][beyond] = math.nan, math.nan
    verifier[[0, 1], lengths] = scores(2, 5, seed=3)
    tokens = drafted_from(draft.nan_to_num()).masked_fill(beyond, -100)
    found = verify(tokens, verifier, draft, Cactus(0.3), block_lengths=lengths, generator=seeded())
    assert torch.equal(found.accepted, lengths) and not found.invalid.any()
    assert not found.accepted_losslessly[beyond].any()
    short = verify(tokens[:, :2], verifier[:, :3], draft[:, :2], Cactus(0.3), block_lengths=lengths)
    assert torch.equal(short.accepted, lengths) and not short.invalid.any()
    rejected = tokens.clone()
    rejected[:, 0] = verifier[:, 0].argmin(-1)
    check(rejected.clamp(min=0), scores(2, 4, 5), scores(2, 3, 5, seed=1), Speculative(), lengths)


@pytest.mark.parametrize("draft_scores", [None, torch.zeros(2, 0, 3, device=DEVICE)], ids=["no draft", "no positions"])
def test_an_empty_block_samples_the_verifier(draft_scores):
    verifier = torch.tensor([[[-torch.inf, 0.0, -torch.inf]], [[0.0, -torch.inf, -torch.inf]]], device=DEVICE)
    outcome = verify(torch.zeros(2, 0, dtype=torch.long, device=DEVICE), verifier, draft_scores, Cactus(0.2))
    assert outcome.accepted.tolist() == [0, 0] and outcome.next_token.tolist() == [1, 0]
    assert outcome.accepted_losslessly.shape == (2, 0) and outcome.invalid.tolist() == [0, 0]


def test_the_largest_vocabulary(monkeypatch):
    # Few programs: each takes the interpreter as long as any.
    monkeypatch.setattr(fused_verification, "NORMALIZED_CHUNK", 2**15)
    monkeypatch.setattr(fused_verification, "RACED_CHUNK", 2**14)
    vocab = 256_000
    verifier, draft = torch.full((1, 2, vocab), -torch.inf, device=DEVICE), scores(1, 1, vocab)
    verifier[0, :, [0, 4095, vocab - 1]] = torch.tensor([1.0, 2.0, 9.0], device=DEVICE)
    token, none = torch.tensor([[5]], device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
    rows, draft_rows = fused_verification.fused_rows(verifier, draft)
    torch.testing.assert_close(rows.log_normalizer.double(), verifier.double().logsumexp(-1))
    torch.testing.assert_close(draft_rows.log_normalizer.double(), draft.double().logsumexp(-1))
    found, _ = fused_verification.fused_next_token(token, none, none + 1, rows, draft_rows, Cactus(0.3), seeded())
    assert found.tolist() == [vocab - 1]


def test_truncated_rows_never_give_an_excluded_token():
    verifier, draft = scores(2, 2, 1500), scores(2, 1, 1500, seed=1)
    kept = verifier.topk(3).indices
    verifier = torch.full_like(verifier, -torch.inf).scatter(-1, kept, 0.0)
    for seed in range(8):
        tokens = kept[:, :1, seed % 3] if seed % 2 else drafted_from(draft, seed)
        found = check(tokens, verifier, draft, Cactus(0.3), seed=seed)
        assert verifier[torch.arange(2), found.accepted].isfinite().gather(1, found.next_token[:, None]).all()


DEGENERATE = {
    # verifier, draft, drafted token, what may come out: as GammaRule.recovery_weights documents it.
    "certain verifier": ([0.0, -torch.inf, -torch.inf], [0.0, 0.0, 0.0], 1, {0}),
    "one unlikely score": ([-torch.inf, -torch.inf, -50.0], [0.0, 0.0, 0.0], 0, {2}),
    "residual empty by rounding": ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0], 0, {1, 2}),
    "nothing but the rejected token": ([-torch.inf, 3.0, -torch.inf], [0.0, 0.0, 0.0], 1, {1}),
    "underflow of all others": ([0.0, -200.0, -200.0], [1.0, 0.0, 0.0], 0, {0}),
}


@pytest.mark.parametrize(("verifier", "draft", "token", "possible"), DEGENERATE.values(), ids=DEGENERATE)
def test_numerically_empty_residuals_fall_back(verifier, draft, token, possible):
    rows = torch.tensor([[verifier, verifier]], device=DEVICE).expand(2, -1, -1)
    drafts = torch.tensor([[draft]], device=DEVICE).expand(2, -1, -1)
    tokens, none = torch.tensor([[token]] * 2, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)
    verifier_rows, draft_rows = fused_verification.fused_rows(rows, drafts)
    # Of rows that are alike the same numbers are subtracted, whatever the rounding.
    assert (verifier != draft) or torch.equal(verifier_rows.log_normalizer[:, :1], draft_rows.log_normalizer)
    seen = set()
    for seed in range(6):
        found, invalid = fused_verification.fused_next_token(
            tokens, none, none + 1, verifier_rows, draft_rows, Speculative(), seeded(seed)
        )
        assert invalid.tolist() == [0, 0]
        seen |= set(found.tolist())
    assert seen == possible


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize(("side", "position"), [(1, 0), (1, 2), (2, 0), (2, 1)])
def test_a_row_that_is_no_distribution_is_flagged(bad, side, position):
    verifier = scores(2, 3, 3)
    draft = verifier[:, :-1].clone()  # alike: accepted up to the bad row
    tokens = torch.tensor([[0, 1]] * 2, device=DEVICE)
    (verifier if side == 1 else draft)[1, position] = torch.tensor(bad, device=DEVICE)
    outcome = verify(tokens, verifier, draft, Cactus(0.2), generator=seeded())
    assert outcome.accepted.tolist() == [2, position]
    assert outcome.invalid.tolist() == [0, side]
    assert 0 <= outcome.next_token[1] < 3


def test_the_noise_is_gumbel_noise_down_to_its_tail():
    """False alarms: 10^-6 for each of the comparisons."""
    noise = noise_of(torch.tensor([2**62 + 12345], device=DEVICE), 2**18).double().cpu()
    exponential = (-noise).exp()
    assert stats.kstest(exponential.flatten().numpy(), "expon").pvalue > 1e-6
    # The winners of a race over a large vocabulary come from here.
    smallest = exponential[exponential < 1e-3].numpy()
    assert len(smallest) > 800
    assert stats.kstest(-smallest, stats.truncexpon(b=1e-3, loc=-1e-3).cdf).pvalue > 1e-6
    # In steps of 2^-24 = 6e-8, as 1 - u has, some 30 pairs of them would be equal.
    assert len(smallest) - len(set(smallest)) < 5
    # Sequences and chunks have noise of their own.
    parts = noise.view(4, -1)
    assert (torch.corrcoef(parts) - torch.eye(4)).abs().max() < 5 / 2**9
    assert not torch.equal(parts[0], noise_of(torch.tensor([2**62 + 12346], device=DEVICE), 2**18)[0, : 2**18].cpu())


def law_of(weights):
    return {token: float(weight) for token, weight in enumerate(weights / weights.sum())}


def test_recovery_and_bonus_follow_their_laws():
    """False alarms: `chi_square.ALPHA` for each of two comparisons; a fixed seed."""
    many = 300 if DEVICE.type == "cpu" else 100_000
    q = torch.tensor([0.1, 0.42, 0.4, 0.06, 0.02, 0.0], dtype=torch.float64)
    p = torch.tensor([0.6, 0.31, 0.05, 0.03, 0.005, 0.005], dtype=torch.float64)
    rule, token = Cactus(0.3), 0
    raised = 0.1 + math.sqrt(2 * 0.3 * 0.1 * 0.9)
    others = q * (1 - raised) / 0.9
    others[token] = 0
    half = torch.arange(many, device=DEVICE) % 2
    rows, draft_rows = fused_verification.fused_rows(*(x.log().float().to(DEVICE).view(1, 1, -1) for x in (q, p)))
    # One row for all of them, and the sequences of odd number end behind an empty block.
    verifier = type(rows)(rows.scores.expand(many, 2, -1), rows.log_normalizer.expand(many, 2))
    draft = type(rows)(draft_rows.scores.expand(many, 1, -1), draft_rows.log_normalizer.expand(many, 1))
    tokens = torch.full((many, 1), token, device=DEVICE)
    nothing = torch.zeros(many, dtype=torch.long, device=DEVICE)
    found, _ = fused_verification.fused_next_token(tokens, nothing, 1 - half, verifier, draft, rule, seeded(11))
    recovered, bonus = found[half == 0].tolist(), found[half == 1].tolist()
    laws = {
        "residual": law_of((others - p).clamp(min=0)),
        "unscaled": law_of((q - p).clamp(min=0) * (torch.arange(6) != token)),
        "nothing covered": law_of(others),
        "verifier": law_of(q),
    }
    fits = {name: chi_square.p_value(recovered, law) > chi_square.ALPHA for name, law in laws.items()}
    assert fits.pop("residual") and not any(fits.values())
    fits = {name: chi_square.p_value(bonus, law) > chi_square.ALPHA for name, law in laws.items()}
    assert fits.pop("verifier") and not any(fits.values())


def test_random_numbers_come_from_the_generator_and_are_used_once():
    verifier, draft = scores(2, 3, 40), scores(2, 2, 40, seed=1)
    tokens = drafted_from(draft)
    outcomes = [verify(tokens, verifier, draft, generator=seeded(seed)) for seed in (3, 3, 4, 5, 6)]
    next_tokens = [outcome.next_token.tolist() for outcome in outcomes]
    assert next_tokens[0] == next_tokens[1] and len({*map(tuple, next_tokens)}) > 2
    torch.manual_seed(5)
    once = verify(tokens, verifier, draft).next_token
    again = verify(tokens, verifier, draft).next_token
    torch.manual_seed(5)
    assert torch.equal(once, verify(tokens, verifier, draft).next_token)
    assert torch.equal(again, verify(tokens, verifier, draft).next_token)
    # Two sequences that are alike in everything draw from noise of their own.
    flat = torch.zeros(2, 1, 2000, device=DEVICE)
    drawn = verify(torch.zeros(2, 0, dtype=torch.long, device=DEVICE), flat, None, generator=seeded()).next_token
    assert drawn[0] != drawn[1]


def test_nothing_of_the_size_of_a_row_is_written():
    vocab = 5000
    verifier, draft = scores(1, 3, vocab), scores(1, 2, vocab, seed=1)
    tokens = drafted_from(draft)

    def largest(*scores):
        with OutputSizes() as recorded:
            verify(tokens, *scores, CactusExact(0.2))
        # The interpreter copies the arguments of a launch, with these.
        copied = {"aten.set_.source_Storage_storage_offset", "aten.set_.source_Storage", "aten.copy_.default"}
        return max(size for size, name in recorded.sizes if name not in copied)

    assert largest(verifier, draft) < 50
    assert largest(verifier.double(), draft.double()) >= vocab


@dataclass(frozen=True)
class OwnRecovery(Speculative):
    """A rule whose recovery the kernel does not know."""

    def recovery_weights(self, tokens, verifier_probs, draft_probs):
        return torch.ones_like(verifier_probs)


def test_what_the_kernels_do_not_know_runs_in_pytorch(monkeypatch):
    verifier, draft = scores(2, 3, 8), scores(2, 2, 8)
    rule = Cactus(0.2)
    assert fused_verification.fusable(rule, verifier, draft) is rule
    assert fused_verification.fusable(TotalVariation(0.2), verifier, None) is not None
    assert fused_verification.fusable(OwnRecovery(), verifier, draft) is None
    assert fused_verification.fusable(TopK(2), verifier, draft) is None
    assert fused_verification.fusable(Speculative(), verifier.double(), draft) is None
    assert fused_verification.fusable(Speculative(), verifier, draft.double()) is None
    assert fused_verification.fusable(Speculative(), verifier.clone().requires_grad_(), draft) is None
    monkeypatch.undo()
    assert (fused_verification.fusable(Speculative(), verifier, draft) is None) == (DEVICE.type == "cpu")


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "transformers_cactus.kernels")
    monkeypatch.delattr(transformers_cactus, "kernels")
    fused_verification._usable.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fused_verification.fusable(Speculative(), scores(2, 3, 8), None) is None
            assert verify(torch.zeros(2, 2, dtype=torch.long, device=DEVICE), scores(2, 3, 8)).invalid.tolist() == [
                0,
                0,
            ]
    finally:
        fused_verification._usable.cache_clear()


def outside_the_interpreter(folder, *command):
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], env=variables, capture_output=True, text=True, check=False)


def test_where_the_kernels_do_not_run_there_is_a_warning_and_pytorch(tmp_path):
    # Compiled kernels take no tensors on the CPU.
    lines = [
        "import torch",
        "from transformers_cactus import fused_verification, verify",
        "fused_verification.DEVICES = ('cpu',)",
        "for _ in range(2): print(verify(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 2, 1)).accepted.item())",
    ]
    finished = outside_the_interpreter(tmp_path, "-c", "\n".join(lines))
    assert finished.stdout.split() == ["1", "1"], finished.stderr
    assert finished.stderr.count("UserWarning: The verification runs in PyTorch alone") == 1


def test_the_kernels_compile_for_gpus_and_read_16_bytes_at_a_time(tmp_path):
    finished = outside_the_interpreter(tmp_path, Path(__file__).parent / "compile_kernels.py")
    assert finished.returncode == 0, finished.stderr
    wide = json.loads(finished.stdout)
    assert wide["normalize"] and wide["race"] == 2 * wide["race, no draft"] > 0
    assert not wide["race, any strides"]
