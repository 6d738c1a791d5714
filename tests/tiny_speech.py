"""A tokenizer and a feature extractor for the tiny Whisper of `tiny_models`."""

from transformers import WhisperFeatureExtractor, WhisperTokenizer


def tokenizer() -> WhisperTokenizer:
    """Return a Whisper tokenizer of as many entries as the tiny models have."""
    letters = [chr(code) for code in range(33, 127)]
    specials = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    vocabulary = {token: index for index, token in enumerate([*letters, *specials])}
    return WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")


def feature_extractor() -> WhisperFeatureExtractor:
    """Return one that makes of a second of sound what the tiny encoder takes."""
    return WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400, n_fft=400)
