"""The README's Python runs, on the real pair, as it stands there but for shorter answers."""

import re
from pathlib import Path

import pytest
import torch

import transformers_cactus

README = Path(__file__).parents[1] / "README.md"
SHORTER = ('"max_new_tokens": 40', '"max_new_tokens": 8')


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore")
def test_every_code_block_runs(capsys):
    assert len(blocks()) >= 5 and any(SHORTER[0] in block for block in blocks())
    torch.manual_seed(0)
    scope: dict = {}
    try:
        for block in blocks():
            exec(compile(block.replace(*SHORTER), str(README), "exec"), scope)
    finally:
        if "verifier" in scope:
            transformers_cactus.disable(scope["verifier"])
    printed = capsys.readouterr().out
    assert "mean accepted length" in printed
    assert scope["output"].acceptance.emitted <= 8
    assert "cactus_delta" not in vars(scope["verifier"].generation_config)
