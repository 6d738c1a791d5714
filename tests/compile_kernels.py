"""Compiles the kernels for GPUs, down to machine code, which needs no GPU. Run outside of Triton's interpreter.

The interpreter runs things that the compiler refuses, and says nothing about how a kernel reads memory.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from transformers_cactus import fused_verification, kernels

POINTERS = {
    "positions": "*i64",
    "rejected_tokens": "*i64",
    "scales": "*fp32",
    "verifier_normalizers": "*fp32",
    "draft_normalizers": "*fp32",
    "seed": "*i64",
    "keys": "*fp32",
    "winners": "*i64",
    "results": "*fp32",
}
ONE = {"verifier_token_stride": 1, "draft_token_stride": 1}
"""Triton compiles a kernel anew for an argument that is 1, as the strides of contiguous rows are."""


def wide_reads(kernel, constants: dict, warps: int = 4, capability: int = 90, scores: str = "fp32") -> int:
    """Compiles a kernel for pointers and sizes that are multiples of 16, and counts its reads of 16 bytes."""
    pointers = {**POINTERS, "verifier": f"*{scores}", "draft": f"*{scores}"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    multiples = [name for name in names if name not in constants and ("stride" in name or "vocab" in name)]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in [*multiples, "verifier", "draft"]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert result.asm["cubin"]
    return result.asm["ptx"].count("ld.global.v4")


def main() -> None:
    normalize, normalized = kernels.normalize_chunks, {"CHUNK": fused_verification.NORMALIZED_CHUNK}
    race, raced = kernels.race_chunks, {"CHUNK": fused_verification.RACED_CHUNK, "HAS_DRAFT": True}
    counts = {
        "normalize": wide_reads(normalize, normalized | ONE, warps=8),
        "normalize, one token": wide_reads(normalize, normalized | ONE | {"verifier_vocab": 1, "draft_vocab": 1}),
        "normalize, older GPU": wide_reads(normalize, normalized | ONE, capability=75, scores="bf16"),
        "race": wide_reads(race, raced | ONE),
        "race, no draft": wide_reads(race, raced | ONE | {"HAS_DRAFT": False}),
        "race, one token": wide_reads(race, raced | ONE | {"vocab": 1}),
        "race, any strides": wide_reads(race, raced, scores="fp16"),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
