"""Takes docs/images/visualize.png: `visualize` for an answer of the demo's pair, as Chromium shows it."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

import transformers_cactus
from transformers_cactus.demo import load_pair

QUESTION = "What are the main differences between living in a big city and living in a small village?"
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 100}
WIDTH, HEIGHT, SCALE = 860, 530, 1.5
"""Of the window in CSS pixels, and picture pixels for one of them."""


def main() -> None:
    """Generates, and writes the picture."""
    verifier, draft, tokenizer = load_pair()
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    torch.manual_seed(0)
    output = transformers_cactus.generate(
        verifier, **inputs, **SAMPLING, assistant_model=draft, cactus_delta=0.75, return_dict_in_generate=True
    )
    fragment = transformers_cactus.visualize(output, tokenizer).html()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs chromium or google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "picture.png"
        page.write_text(f'<meta charset="utf-8"><body style="margin:24px">{fragment}</body>', encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        command += [f"--force-device-scale-factor={SCALE}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        shutil.copy(picture, Path(__file__).parent / "images" / "visualize.png")


if __name__ == "__main__":
    main()
