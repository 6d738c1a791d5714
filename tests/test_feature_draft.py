"""Drafts that read the verifier's hidden states: the law of what they help to emit, their cache, their errors.

The reference runs verifier and draft in float64 without caches, on the whole text for every drafted token.
"""

import copy
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_tokenizers
import transformers_cactus
from fast_calls import IGNORE_GREEDY, fast, plain_alone, rows_alone
from reference import Distributions, Sampling, exact_law
from test_distribution import outcomes_of, tiny_llama, verifier_model
from test_fast_distribution import does_not_fit, fits
from transformers_cactus import FeatureDraft, FeatureDraftConfig, few_numbers, token_by_token
from transformers_cactus.adaptive_length import AdaptiveLength

PROMPT = (1, 2, 3)
PROMPTS = [(1, 2, 3), (5, 1, 2, 5, 1), (4,)]
ROWS = 4000
PLAIN = Sampling()


def feature_draft(verifier, *, layers=1, read=(0, 1), proposed=None, seed=3):
    """A draft of random weights for a tiny Llama."""
    own = copy.deepcopy(verifier.config)
    own.num_hidden_layers = layers
    vocab = own.vocab_size
    config = FeatureDraftConfig(
        decoder_config=own,
        target_layer_ids=read,
        vocab_size=vocab,
        draft_vocab_size=None if proposed is None else len(proposed),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = FeatureDraft(config).eval()
        for layer in (draft.project, draft.fuse, draft.lm_head):
            torch.nn.init.normal_(layer.weight, std=0.5)
    if proposed is not None:
        draft.draft_tokens.copy_(torch.tensor(proposed))
    return draft


class Reference:
    """A verifier and a feature draft in float64."""

    def __init__(self, verifier, draft):
        self.verifier, self.draft = copy.deepcopy(verifier).double(), copy.deepcopy(draft).double()
        self.logits = functools.cache(self._logits)

    @torch.no_grad()
    def _logits(self, text, read):
        """The draft's logits behind a text, of which the verifier has read the first `read` tokens."""
        ids = torch.tensor([text])
        states = self.verifier(ids, output_hidden_states=True, use_cache=False).hidden_states
        known = self.draft.features([states[layer + 1] for layer in self.draft.config.target_layer_ids])
        embedded = self.verifier.get_input_embeddings()(ids)
        features = torch.cat([torch.zeros_like(known[:, :1]), known[:, :read]], dim=1)[:, : len(text)]
        while True:
            length = features.shape[1]
            output = self.draft(inputs_embeds=embedded[:, :length], features=features, use_cache=False)
            if length == len(text):
                return output.logits[0, -1]
            features = torch.cat([features, output.last_hidden_state[:, -1:]], dim=1)

    def drafter(self, prompt, block, new_tokens, sampling=PLAIN):
        """For `exact_law`."""

        def draft(start):
            read = len(prompt + start) - 1
            one = lambda text: sampling.distribution(self.logits(prompt + text, read).numpy())  # noqa: E731
            return [one] * min(block, new_tokens - len(start) - 1)

        return draft

    @torch.no_grad()
    def accepted(self, text, lengths):
        """Accepted lengths of greedy rounds with these block lengths."""
        text, found = tuple(text), []
        for length in lengths:
            start, count = text, 0
            drafted = start
            for _ in range(length):
                drafted += (int(self.logits(drafted, len(start) - 1).argmax()),)
            picks = (
                self.verifier(torch.tensor([drafted]), use_cache=False).logits[0, len(start) - 1 :].argmax(-1).tolist()
            )
            while count < length and drafted[len(start) + count] == picks[count]:
                count += 1
            text = (*drafted[: len(start) + count], picks[count])
            found.append(count)
        return found, text


@functools.cache
def pair(vocab=8, proposed=None):
    verifier = verifier_model(vocab)
    return verifier, feature_draft(verifier, proposed=proposed)


def draw(verifier, draft, inputs, new_tokens, block, **options):
    with torch.random.fork_rng():
        torch.manual_seed(2027)
        output = transformers_cactus.generate(
            verifier,
            **inputs,
            assistant_model=draft,
            num_assistant_tokens=block,
            max_new_tokens=new_tokens,
            do_sample=True,
            return_dict_in_generate=True,
            **{"top_k": 0} | options,
        )
    return outcomes_of(output, inputs["input_ids"].shape[1])


def law(verifier, draft, prompt, block, new_tokens, rule, budget, sampling=PLAIN):
    return exact_law(
        Distributions(verifier, prompt, new_tokens, sampling),
        Reference(verifier, draft).drafter(prompt, block, new_tokens, sampling),
        new_tokens,
        rule,
        budget,
    )


@pytest.mark.parametrize("proposed", [None, (0, 2, 3, 5, 6)], ids=["all tokens", "five tokens"])
@pytest.mark.parametrize("rule, budget", [("speculative", 0.0), ("cactus", 0.5)])
def test_law(rule, budget, proposed):
    # Each of three views fails a sample of the right law with a probability below 1e-5 (chi_square.py).
    verifier, draft = pair(8, proposed)
    options = {"cactus_rule": rule} | ({"cactus_delta": budget} if budget else {})
    inputs = {"input_ids": torch.tensor([PROMPT] * ROWS)}
    outcomes = draw(verifier, draft, inputs, 4, 2, **options)
    fits(outcomes, law(verifier, draft, PROMPT, 2, 4, rule, budget))
    if budget:
        does_not_fit(outcomes, law(verifier, draft, PROMPT, 2, 4, "speculative", 0.0))
    # A draft that read the verifier's hidden states of drafted tokens too would have another law of origins.
    knows_all = Reference(verifier, draft)

    def cheating(start):
        return [
            lambda text: PLAIN.distribution(knows_all.logits(PROMPT + text, len(PROMPT + text) - 1).numpy())
        ] * min(2, 4 - len(start) - 1)

    does_not_fit(outcomes, exact_law(Distributions(verifier, PROMPT, 4, PLAIN), cheating, 4, rule, budget))


def test_law_behind_truncation_and_with_rows_of_different_prompts():
    verifier, draft = pair()
    sampling = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in PROMPTS]).repeat(ROWS // 4, 1)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]).repeat(ROWS // 4, 1)
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "cactus_delta": 0.5}
    outcomes = draw(verifier, draft, {"input_ids": ids, "attention_mask": mask}, 4, 3, **options)
    for row, prompt in enumerate(PROMPTS):
        fits(outcomes[row::3], law(verifier, draft, prompt, 3, 4, "cactus", 0.5, sampling))
        does_not_fit(outcomes[row::3], law(verifier, draft, PROMPTS[row - 1], 3, 4, "cactus", 0.5, sampling))


@pytest.mark.parametrize("few", [0, 10**9], ids=["tensors", "python numbers"])
def test_law_of_a_draft_over_some_tokens_behind_top_k(few, monkeypatch):
    """The scores of all others are minus infinity."""
    monkeypatch.setattr(few_numbers, "MOST", few)
    monkeypatch.setattr(token_by_token, "FEW", few)
    verifier, draft = pair(24, (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22))
    sampling = Sampling(temperature=1.2, top_k=4, top_p=0.95)
    options = {"temperature": 1.2, "top_k": 4, "top_p": 0.95, "cactus_delta": 0.5}
    outcomes = draw(verifier, draft, {"input_ids": torch.tensor([PROMPT] * ROWS)}, 3, 2, **options)
    fits(outcomes, law(verifier, draft, PROMPT, 2, 3, "cactus", 0.5, sampling))
    does_not_fit(outcomes, law(verifier, draft, PROMPT, 2, 3, "speculative", 0.0, sampling))


@pytest.mark.filterwarnings(IGNORE_GREEDY)
class TestGreedy:
    """Greedy text is the verifier's; the accepted lengths show what the draft was told."""

    @staticmethod
    def models():
        # Of many seeds, two with which some drafted tokens are accepted and some are not.
        verifier = tiny_llama(8, seed=6, layers=3)
        return verifier, feature_draft(verifier, layers=2, read=(2, 0), seed=36)

    def test_rounds(self):
        verifier, draft = self.models()
        ids = torch.tensor([PROMPT])
        output = fast(verifier, {"input_ids": ids}, assistant_model=draft, num_assistant_tokens=3, max_new_tokens=18)
        lengths = output.acceptance.sequences[0].accepted_per_round
        expected, text = Reference(verifier, draft).accepted(PROMPT, [3] * len(lengths))
        assert sum(expected) > 3  # else nothing here would have been seen
        assert output.sequences[0].tolist() == list(text[: len(PROMPT) + 18])
        # Near the end blocks get shorter.
        assert list(lengths[:-2]) == expected[: len(lengths) - 2]

    def test_rows_of_a_batch(self):
        verifier, draft = self.models()
        width = max(map(len, PROMPTS))
        inputs = {
            "input_ids": torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in PROMPTS]),
            "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]),
        }
        together = fast(verifier, inputs, assistant_model=draft, num_assistant_tokens=4, max_new_tokens=16)
        assert together.sequences[:, width:].tolist() == plain_alone(verifier, inputs, max_new_tokens=16)
        for row, alone in enumerate(rows_alone(inputs)):
            single = fast(verifier, alone, assistant_model=draft, num_assistant_tokens=4, max_new_tokens=16)
            lengths = [
                out.acceptance.sequences[place].accepted_per_round for out, place in ((together, row), (single, 0))
            ]
            assert lengths[0] == lengths[1]

    def test_rounds_without_a_draft(self, monkeypatch):
        """What the verifier reads while nothing is drafted is read by the draft later."""
        verifier, draft = self.models()
        plan = [2, 0, 0, 3, 1, 0, 4, 2, 0, 0, 0, 3, 3]
        lengths = iter(plan)
        monkeypatch.setattr(AdaptiveLength, "next", lambda self: [next(lengths)])
        monkeypatch.setattr(AdaptiveLength, "goes_on", lambda self, probabilities: True)
        expected, text = Reference(verifier, draft).accepted(PROMPT, plan)
        new = len(text) - len(PROMPT)
        output = fast(
            verifier,
            {"input_ids": torch.tensor([PROMPT])},
            assistant_model=draft,
            num_assistant_tokens=4,
            num_assistant_tokens_schedule="adaptive",
            max_new_tokens=new,
        )
        assert sum(expected) > 2
        assert output.sequences[0].tolist() == list(text)
        assert list(output.acceptance.sequences[0].accepted_per_round) == expected

    @pytest.mark.parametrize("removed", [0, 2, 9])
    def test_going_on_from_a_cache(self, removed):
        """Also where the caller has rolled it back, by less or more than the draft has read."""
        verifier, draft = self.models()
        options = {"assistant_model": draft, "num_assistant_tokens": 3, "max_new_tokens": 12}
        first = fast(verifier, {"input_ids": torch.tensor([PROMPT])}, **options)
        cache = first.get("cache", first.get("past_key_values"))
        name = "cache" if "cache" in first else "past_key_values"
        kept = cache.get_seq_length() - removed
        if removed:
            cache.crop(-removed)
        text = torch.cat([first.sequences[:, :kept], torch.tensor([[6, 2, 7]])], dim=1)
        again = fast(verifier, {"input_ids": text}, **options, **{name: cache})
        fresh = fast(verifier, {"input_ids": text}, **options)
        assert again.sequences.tolist() == fresh.sequences.tolist()
        if removed == 0:
            # Rolled back, the draft lacks one token's hidden states, and may draft other tokens.
            assert again.acceptance.sequences[0].accepted_per_round == fresh.acceptance.sequences[0].accepted_per_round

    def test_a_cache_that_another_draft_filled(self):
        verifier, draft = self.models()
        ids = {"input_ids": torch.tensor([PROMPT])}
        first = fast(verifier, ids, assistant_model=tiny_llama(8, seed=1, layers=1), max_new_tokens=8)
        name = "cache" if "cache" in first else "past_key_values"
        text = torch.cat([first.sequences, torch.tensor([[6]])], dim=1)
        again = fast(verifier, {"input_ids": text}, assistant_model=draft, **{name: first[name]})
        assert (
            again.sequences.tolist() == fast(verifier, {"input_ids": text}, assistant_model=draft).sequences.tolist()
        )


def test_saved_and_loaded(tmp_path):
    verifier, draft = pair(8, (0, 2, 3, 5, 6))
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is FeatureDraft
    assert loaded.config.target_layer_ids == [0, 1]
    inputs = {"input_ids": torch.tensor([PROMPT] * 20)}
    texts = [draw(verifier, model, inputs, 8, 3, cactus_delta=0.5) for model in (draft, loaded)]
    assert texts[0] == texts[1]


def test_half_precision_draft():
    verifier, draft = pair()
    half = copy.deepcopy(draft).to(torch.bfloat16)
    outcomes = draw(verifier, half, {"input_ids": torch.tensor([PROMPT] * 8)}, 12, 3, cactus_delta=0.5)
    assert {len(text) for text, _ in outcomes} == {12}


class TestErrors:
    def test_stock_engine(self):
        verifier, draft = pair()
        with pytest.raises(ValueError, match=r"FeatureDraft runs in the fast engine only.*cactus_engine='stock'"):
            draw(verifier, draft, {"input_ids": torch.tensor([PROMPT])}, 4, 2, cactus_delta=0.5, cactus_engine="stock")

    def test_a_tokenizer_of_its_own(self):
        verifier, draft = pair()
        tokenizers = {"tokenizer": tiny_tokenizers.build(), "assistant_tokenizer": tiny_tokenizers.build()}
        tokenizers["assistant_tokenizer"].add_tokens(["another"])
        with pytest.raises(ValueError, match="has its verifier's tokenizer: leave out assistant_tokenizer"):
            draw(verifier, draft, {"input_ids": torch.tensor([PROMPT])}, 4, 2, cactus_delta=0.5, **tokenizers)

    def test_alone(self):
        with pytest.raises(TypeError, match="pass it as assistant_model=, to a verifier"):
            pair()[1].generate(torch.tensor([PROMPT]))

    def test_transformers_own_assisted_generation(self):
        verifier, draft = pair()
        with pytest.raises(TypeError, match="pass it as assistant_model="):
            verifier.generate(torch.tensor([PROMPT]), assistant_model=draft, max_new_tokens=4)

    @pytest.mark.parametrize(
        "other, message",
        [
            (lambda: tiny_llama(9, seed=0, layers=2), "vocab_size 8, not 9"),
            (lambda: tiny_llama(8, seed=0, layers=1), r"reads the layers \[0, 1\] \(target_layer_ids.*has 1\."),
        ],
    )
    def test_another_verifier(self, other, message):
        with pytest.raises(ValueError, match=message):
            draw(other(), pair()[1], {"input_ids": torch.tensor([PROMPT])}, 4, 2, cactus_delta=0.5)

    @pytest.mark.parametrize(
        "wrong, message",
        [
            ({"target_layer_ids": []}, "target_layer_ids must name at least one layer"),
            ({"target_layer_ids": [-1]}, "target_layer_ids must name .* from 0, got"),
            ({"target_layer_ids": [1, 1]}, "each once"),
            ({"target_layer_ids": [0.5]}, "target_layer_ids must name"),
            ({"draft_vocab_size": 9}, "draft_vocab_size must be from 1 to vocab_size, which is 8, got 9"),
            ({"draft_vocab_size": 0}, "draft_vocab_size must be from 1"),
            ({"decoder_config": None}, "needs decoder_config"),
        ],
    )
    def test_wrong_configurations(self, wrong, message):
        right = {"decoder_config": pair()[0].config, "target_layer_ids": [0, 1], "vocab_size": 8}
        with pytest.raises(ValueError, match=message):
            FeatureDraft(FeatureDraftConfig(**right | wrong))

    def test_the_given_configuration_stays_as_it_was(self):
        verifier = tiny_llama(8, seed=0, layers=2)
        before = str(verifier.config), verifier.config._attn_implementation
        FeatureDraft(FeatureDraftConfig(decoder_config=verifier.config, target_layer_ids=[0], vocab_size=8))
        assert (str(verifier.config), verifier.config._attn_implementation) == before

    def test_compiling_has_no_effect(self):
        verifier, draft = pair()
        with pytest.warns(UserWarning, match="cactus_compile=True has no effect.*reads hidden states"):
            draw(verifier, draft, {"input_ids": torch.tensor([PROMPT])}, 4, 2, cactus_delta=0.5, cactus_compile=True)
