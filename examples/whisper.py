"""Speech recognition: a large Whisper, drafted for by a small one.

python examples/whisper.py --verifier openai/whisper-large-v3 --draft openai/whisper-tiny --audio speech.wav
"""

import argparse

import numpy as np
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

import transformers_cactus

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--verifier", default="openai/whisper-small", help="name or folder")
parser.add_argument("--draft", default="openai/whisper-tiny", help="name or folder")
parser.add_argument("--audio", help="a sound file, which needs ffmpeg (default: a second of noise)")
names = parser.parse_args()

noise = {"raw": np.random.default_rng(0).standard_normal(16_000).astype("float32"), "sampling_rate": 16_000}
processor = AutoProcessor.from_pretrained(names.verifier)
pipe = transformers_cactus.pipeline(
    "automatic-speech-recognition",
    model=AutoModelForSpeechSeq2Seq.from_pretrained(names.verifier),
    tokenizer=processor.tokenizer,
    feature_extractor=processor.feature_extractor,
    assistant_model=AutoModelForSpeechSeq2Seq.from_pretrained(names.draft),
)

# This pipeline searches with beams by default, and transcribes without sampling, where delta has nothing to decide.
sampling = {"num_beams": 1, "do_sample": True, "temperature": 0.4, "max_new_tokens": 40}
for delta in (0.0, 0.5):
    result = pipe(names.audio or dict(noise), generate_kwargs={**sampling, "cactus_delta": delta})
    print(f"delta {delta}: {result['text']}")
