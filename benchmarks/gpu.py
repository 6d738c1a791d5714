"""The verification kernels and whole rounds on a GPU: right, without waiting, and how fast.

    python -m benchmarks.gpu    # everything, under 10 minutes
    TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --quick    # tiny shapes: only that it runs

1. *Correct*: log-sum-exps and decisions of the kernels against PyTorch in float64, and sampled recovery tokens against
   the exact residual (chi-square).
2. *Waiting*: operations for which the host waits, per round of the fast engine, and where. One is meant to.
3. *Verification*: one call of `verify` with the kernels and in PyTorch alone. "device" is the time of its kernels
   alone, replayed as a CUDA graph; "call" is what a call takes when the host launches them one by one; "floor" is the
   time to read each row of the block once, at the bandwidth of a copy. Scores are float32, as the fast engine passes.
4. *Rounds*: the fast engine with models of real shapes and random weights, so nothing is downloaded. Their
   distributions are nearly flat and nearly alike, so the acceptance is synthetic: only times mean something. "outside"
   is what a round takes beyond the forwards of its models, each timed on its own.
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

import transformers_cactus
from transformers_cactus import Cactus, CactusExact, Lenience, Speculative, fused_verification, verify
from transformers_cactus.evaluation.costs import measure_costs

COMMON = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
VERIFIER = Qwen3Config(
    hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32, **COMMON
)
DRAFT = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
    **COMMON,
)
"""The shapes of Qwen3-8B and Qwen3-0.6B."""

TINY = Qwen3Config(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0, "top_k": 0},
    "temperature 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


@contextmanager
def in_pytorch() -> Iterator[None]:
    """Verification without the kernels."""
    devices, fused_verification.DEVICES = fused_verification.DEVICES, ()
    try:
        yield
    finally:
        fused_verification.DEVICES = devices


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Milliseconds of a call: the median, each from a device without work to one without work."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def device_ms(call: Callable[[], Any], device: torch.device, repetitions: int) -> float:
    """Milliseconds of the device's work for a call alone, from a graph of it; NaN without a GPU."""
    if device.type != "cuda":
        return float("nan")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        graph.replay()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / repetitions


# 1. Correct.
def check_decisions(device: torch.device, vocabularies: list[int], batch: int, block: int) -> None:
    """Decisions and log-sum-exps against float64; raises where they differ by more than rounding."""
    for rule in (Speculative(), Cactus(0.3), CactusExact(0.3), Lenience(2.0)):
        for vocab in vocabularies:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                verifier = (2 * torch.randn(batch, block + 1, vocab, device=device)).to(dtype)
                draft = (verifier[:, :-1] + torch.randn(batch, block, vocab, device=device)).to(dtype)
                tokens = torch.multinomial(draft.float().softmax(-1).flatten(0, 1), 1).view(batch, block)
                state = torch.Generator(device).manual_seed(vocab)
                found = verify(tokens, verifier, draft, rule, generator=state)
                state = torch.Generator(device).manual_seed(vocab)
                wide = verify(tokens, verifier.double(), draft.double(), rule, generator=state)
                rows, _ = fused_verification.fused_rows(verifier, draft)
                error = (rows.log_normalizer.double() - verifier.double().logsumexp(-1)).abs().max().item()
                # A random number within rounding of the threshold may decide otherwise.
                differing = int((found.accepted != wide.accepted).sum())
                allowed = verifier[torch.arange(batch, device=device), found.accepted].isfinite()
                inside = bool(allowed.gather(1, found.next_token[:, None]).all())
                if error > 1e-5 or differing > max(1, batch // 1000) or not inside or found.invalid.any():
                    raise AssertionError(f"{rule}, {vocab} tokens, {dtype}: error {error}, {differing} differ")
    print(f"decisions and log-sum-exps agree with float64 at {vocabularies} tokens")


def check_samples(device: torch.device, vocab: int, samples: int) -> None:
    """Recovery tokens against the exact residual. False alarms: one in 10^6."""
    generator = torch.Generator(device).manual_seed(0)
    verifier, noise = (2 * torch.randn(1, 1, vocab, device=device, generator=generator) for _ in range(2))
    # Near the verifier, so that most of it is covered and the residual another distribution.
    draft, rule = verifier + noise / 2, Cactus(0.1)
    token = (draft.double().softmax(-1) - verifier.double().softmax(-1)).argmax(-1)
    q, p = (x[:, 0].double().softmax(-1) for x in (verifier, draft))
    law = rule.recovery_weights(token[0], q, p)[0]
    rows, draft_rows = fused_verification.fused_rows(verifier, draft)
    assert draft_rows is not None
    none = torch.zeros(samples, dtype=torch.long, device=device)
    found, _ = fused_verification.fused_next_token(
        token.expand(samples, 1),
        none,
        none + 1,
        type(rows)(verifier.expand(samples, 1, -1), rows.log_normalizer.expand(samples, 1)),
        type(rows)(draft.expand(samples, 1, -1), draft_rows.log_normalizer.expand(samples, 1)),
        rule,
        generator,
    )
    for name, weights, fits in (("the residual", law, True), ("the verifier", q[0], False)):
        p_value = chi_square(torch.bincount(found, minlength=vocab), weights / weights.sum())
        print(f"{samples} recovery tokens against {name}: p = {p_value:.3g}")
        if (p_value > 1e-6) != fits:
            raise AssertionError(f"samples {'do not fit' if fits else 'also fit'} {name}")


def chi_square(counts: Tensor, law: Tensor) -> float:
    """p-value of counts under a law; what is expected fewer than 8 times shares a bin. 0 for what is impossible."""
    expected = law * counts.sum()
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    large = expected >= 8
    observed = torch.cat([counts[large].double(), counts[~large].sum().double()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    kept = expected >= 8
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum().cpu()
    return float(torch.special.gammaincc((kept.sum().cpu().double() - 1) / 2, statistic / 2))


# 2. Waiting.
def print_waits(verifier: PreTrainedModel, draft: PreTrainedModel, block: int, rounds: int) -> None:
    """Operations for which the host waits, per round, by the line that they come from."""
    if verifier.device.type != "cuda":
        print("not counted without a GPU")
        return
    counts = []
    # Of calls of different length, so that what is done once per call cancels.
    for new_tokens in (4 * block, 4 * block + rounds * (block + 1)):
        generate(verifier, draft, block, new_tokens, 1, SAMPLINGS["temperature 1"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output, _ = generate(verifier, draft, block, new_tokens, 1, SAMPLINGS["temperature 1"])
            finally:
                torch.cuda.set_sync_debug_mode("default")
        lines = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
        counts.append((collections.Counter(lines), output.acceptance.rounds))
    (short, few), (long, many) = counts
    per_round = {line: (long[line] - short[line]) / (many - few) for line in long}
    print(f"{sum(per_round.values()):.2f} waits per round (1 is meant), in {many - few} rounds")
    for line, count in sorted(per_round.items(), key=lambda item: -item[1]):
        print(f"  {count:5.2f}  {line}")


# 3. Verification.
def copy_bandwidth(device: torch.device, quick: bool) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty((1 if quick else 256) * 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source), device, 10) / 1e3)


def time_verification(
    device: torch.device, vocabularies: list[int], blocks: list[int], batches: list[int], repetitions: int, quick: bool
) -> list[dict[str, float]]:
    bandwidth = copy_bandwidth(device, quick)
    print(f"bandwidth of a copy {bandwidth / 1e12:.2f} TB/s\n")
    print(
        "| vocabulary | block | batch | floor µs | kernels, device µs | PyTorch, device µs | kernels, call µs |",
        end="",
    )
    print(" PyTorch, call µs |\n|---:|---:|---:|---:|---:|---:|---:|---:|")
    results = []
    for vocab in vocabularies:
        for block in blocks:
            for batch in batches:
                verifier = torch.randn(batch, block + 1, vocab, device=device)
                draft = torch.randn(batch, block, vocab, device=device)
                tokens = torch.randint(vocab, (batch, block), device=device)

                def call(tokens: Tensor = tokens, verifier: Tensor = verifier, draft: Tensor = draft) -> None:
                    verify(tokens, verifier, draft, Cactus(0.5), measure=False)

                floor = 1e6 * (verifier.nbytes + draft.nbytes) / bandwidth
                kernels = (1e3 * device_ms(call, device, repetitions), 1e3 * median_ms(call, device, repetitions))
                with in_pytorch():
                    plain = (1e3 * device_ms(call, device, repetitions), 1e3 * median_ms(call, device, repetitions))
                row = {"vocab": vocab, "block": block, "batch": batch, "floor": floor}
                row |= {
                    "kernels": kernels[0],
                    "pytorch": plain[0],
                    "kernels_call": kernels[1],
                    "pytorch_call": plain[1],
                }
                results.append(row)
                cells = [f"{vocab}", f"{block}", f"{batch}", *(f"{value:.0f}" for value in list(row.values())[3:])]
                print("| " + " | ".join(cells) + " |", flush=True)
    return results


# 4. Rounds.
def build(config: Qwen3Config, device: torch.device) -> PreTrainedModel:
    """A model with random weights and without an end-of-sequence token."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


def generate(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    block: int,
    new_tokens: int,
    batch: int,
    sampling: dict[str, Any],
) -> tuple[Any, float]:
    """A call of the fast engine, and its seconds."""
    prompt = torch.randint(10, 300, (batch, 64), generator=torch.Generator().manual_seed(0)).to(verifier.device)
    synchronize(verifier.device)
    started = time.perf_counter()
    output = transformers_cactus.generate(
        verifier,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=draft,
        do_sample=True,
        max_new_tokens=new_tokens,
        num_assistant_tokens=block,
        cactus_delta=0.5,
        cactus_engine="fast",
        return_dict_in_generate=True,
        **sampling,
    )
    synchronize(verifier.device)
    return output, time.perf_counter() - started


def time_rounds(
    verifier: PreTrainedModel, draft: PreTrainedModel, blocks: list[int], batches: list[int], new_tokens: int
) -> list[dict[str, Any]]:
    """Milliseconds per round of eager models, with the kernels and in PyTorch."""
    results = []
    for block in blocks:
        cost = measure_costs(verifier, draft, block)
        forwards = 1e3 * cost.verifier_step * (cost.verifier_block + block * cost.draft_step)
        print(f"\nblock {block}: V(1) {1e3 * cost.verifier_step:.2f} ms, ", end="")
        print(f"v {cost.verifier_block:.2f}, c {cost.draft_step:.3f}, forwards of a round {forwards:.2f} ms (batch 1)")
        print("| batch | sampling | verification | ms per round | outside ms (batch 1) | AL, synthetic |")
        print("|---:|---|---|---:|---:|---:|")
        for batch in batches:
            for name, sampling in SAMPLINGS.items():
                for path in ("kernels", "PyTorch"):
                    with in_pytorch() if path == "PyTorch" else warnings.catch_warnings():
                        row = time_one(verifier, draft, block, batch, sampling, new_tokens)
                    outside = f"{row['ms'] - forwards:.2f}" if batch == 1 else ""
                    print(f"| {batch} | {name} | {path} | {row['ms']:.2f} | {outside} | {row['al']:.2f} |", flush=True)
                    results.append({"block": block, "batch": batch, "sampling": name, "path": path, **row})
    return results


def time_one(
    verifier: PreTrainedModel,
    draft: PreTrainedModel,
    block: int,
    batch: int,
    sampling: dict[str, Any],
    new_tokens: int,
) -> dict[str, float]:
    """Milliseconds per round, from the difference of a long call and a short one, and the mean accepted length."""
    generate(verifier, draft, block, 2 * block, batch, sampling)
    runs = [generate(verifier, draft, block, length, batch, sampling) for length in (2 * block, new_tokens)]
    rounds = [max(len(s.drafted_per_round) for s in output.acceptance.sequences) for output, _ in runs]
    seconds = (runs[1][1] - runs[0][1]) / (rounds[1] - rounds[0])
    return {"ms": 1e3 * seconds, "al": runs[1][0].acceptance.mean_accepted_length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and models")
    parser.add_argument("--json", type=Path, help="write the times to this file")
    arguments = parser.parse_args()
    device, quick = torch.device(arguments.device), arguments.quick
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        fused_verification.DEVICES = (device.type,)
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    if fused_verification.fusable(Speculative(), torch.zeros(1, 1, 1, device=device), None) is None:
        raise SystemExit("the kernels do not run here: see how to call this, install triton, or see the warning above")

    results: dict[str, Any] = {"device": name, "torch": torch.__version__}
    pair: list[PreTrainedModel] = []

    def correct() -> None:
        check_decisions(device, [40, 1030] if quick else [1, 1030, 49_152, 151_936, 256_000], 2 if quick else 16, 2)
        check_samples(device, 12 if quick else 1000, 150 if quick else 200_000)

    def waits() -> None:
        pair.extend(build(config, device) for config in ((TINY, TINY) if quick else (VERIFIER, DRAFT)))
        print_waits(pair[0], pair[1], 4, 20)

    def verification() -> None:
        shapes = ([500], [2], [1]) if quick else ([32_768, 49_152, 128_256, 151_936, 256_000], [4, 8, 20], [1, 8, 32])
        results["verification"] = time_verification(device, *shapes, 3 if quick else 30, quick)

    def rounds() -> None:
        shapes = ([2], [1], 8) if quick else ([4, 8], [1, 8], 120)
        results["rounds"] = time_rounds(pair[0], pair[1], *shapes)

    failed = []
    for title, section in {
        "Correct": correct,
        "Waiting": waits,
        "Verification": verification,
        "Rounds": rounds,
    }.items():
        started = time.perf_counter()
        print(f"\n## {title}\n", flush=True)
        try:
            section()
        except Exception:
            # The time on a GPU may be short: what comes after is measured all the same.
            traceback.print_exc()
            failed.append(title)
        print(f"\n({time.perf_counter() - started:.0f} s)", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
