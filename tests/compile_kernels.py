"""Compiles the kernels for GPUs, down to machine code, which needs no GPU. Run outside of Triton's interpreter.

The interpreter runs things that the compiler refuses, and says nothing about how a kernel reads memory.
"""

import json
import sys

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


def compiled(kernel, scores: str, capability: int, warps: int, constants: dict) -> str:
    """The PTX code of a kernel, for pointers and sizes that are multiples of 16."""
    pointers = {**POINTERS, "verifier": f"*{scores}", "draft": f"*{scores}"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    multiples = [name for name in names if name not in constants and ("stride" in name or "vocab" in name)]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in [*multiples, "verifier", "draft"]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert result.asm["cubin"]
    return result.asm["ptx"]


def main(scores: str, capability: int) -> None:
    normalized = {"CHUNK": fused_verification.NORMALIZED_CHUNK}
    raced = {"CHUNK": fused_verification.RACED_CHUNK, "HAS_DRAFT": True}
    codes = {
        "normalize_chunks": compiled(kernels.normalize_chunks, scores, capability, 8, normalized | ONE),
        "race_chunks": compiled(kernels.race_chunks, scores, capability, 4, raced | ONE),
        "race_chunks without a draft": compiled(
            kernels.race_chunks, scores, capability, 4, raced | {"HAS_DRAFT": False} | ONE
        ),
        "race_chunks of one token": compiled(kernels.race_chunks, scores, capability, 4, raced | {"vocab": 1} | ONE),
        "normalize_chunks of one token": compiled(
            kernels.normalize_chunks, scores, capability, 8, normalized | {"verifier_vocab": 1, "draft_vocab": 1} | ONE
        ),
        "race_chunks with any strides": compiled(kernels.race_chunks, scores, capability, 4, raced),
    }
    print(json.dumps({name: code.count("ld.global.v4") for name, code in codes.items()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
