"""`visualize`: every token is there once, in its colour and shade; the chart has every round."""

import io
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

import tiny_models
import tiny_tokenizers
import transformers_cactus
from transformers_cactus import Origin, Reply, SequenceStatistics, Visualization, visualize
from transformers_cactus.visualization import COLOURS

TOKENIZER = tiny_tokenizers.build()


def generated(**options):
    verifier, draft = tiny_models.pair("llama")
    torch.manual_seed(0)
    call = {"do_sample": True, "max_new_tokens": 24, "return_dict_in_generate": True, "cactus_delta": 0.75} | options
    return transformers_cactus.generate(verifier, assistant_model=draft, **call)


class Spans(HTMLParser):
    """Collects tokens with their titles and backgrounds, the rectangles of the chart, and checks nesting."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tokens, self.bars = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag == "br":
            return
        self.open.append(tag)
        attributes = dict(attributes)
        if tag == "span":
            self.tokens.append(["", attributes["title"], attributes["style"]])
        if tag == "rect":
            self.bars.append(attributes)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "span":
            self.tokens[-1][0] += data


def test_every_token_in_its_colour():
    output = generated(**tiny_models.prompts([6]))
    view = visualize(output, TOKENIZER)
    assert "".join(view.pieces) == TOKENIZER.decode(output.sequences[0, 6:], skip_special_tokens=True)
    statistics = output.acceptance.sequences[0]
    spans = Spans(view._repr_html_())
    for (piece, title, style), text, origin, nats in zip(
        spans.tokens, view.pieces, statistics.origins, statistics.divergence, strict=False
    ):
        assert piece == text and title == f"{origin.value}, {nats:.3f} nats"
        assert f"rgb({','.join(map(str, COLOURS[origin]))})" in style
    assert len(spans.tokens) == 24 + len(set(statistics.origins))  # and the legend
    filled = [bar for bar in spans.bars if bar["fill"] != "none"]
    assert len(spans.bars) - len(filled) == len(statistics.drafted_per_round)
    assert len(filled) == output.acceptance.accepted


def test_shade_follows_the_divergence():
    origins = [Origin.DELTA] * 4
    statistics = SequenceStatistics([4], [4], origins, [0.0, 0.1, 0.5, float("inf")])
    spans = Spans(Visualization(list("abcd"), statistics).html())
    alphas = [float(re.search(r"rgba\(.*,([\d.]+)\)", style)[1]) for _, _, style in spans.tokens[:4]]
    assert alphas == sorted(set(alphas)) and alphas[-1] < 1


def test_text_is_escaped():
    statistics = SequenceStatistics([1], [1], [Origin.LOSSLESS, Origin.BONUS], [0.0, 0.0])
    text = Visualization(["<script>", '&"'], statistics).html()
    assert "<script>" not in text and [token[0] for token in Spans(text).tokens[:2]] == ["<script>", '&"']


def test_one_sequence_of_a_batch():
    output = generated(**tiny_models.prompts([6, 3]), eos_token_id=list(range(80, 97)), pad_token_id=0)
    lengths = [len(one.origins) for one in output.acceptance.sequences]
    assert lengths[0] != lengths[1]
    for row, length in enumerate(lengths):
        view = visualize(output, TOKENIZER, sequence=row)
        expected = TOKENIZER.decode(output.sequences[row, 6 : 6 + length], skip_special_tokens=True)
        assert "".join(view.pieces) == expected and len(view.pieces) == length
        console = Console(record=True, width=120, file=io.StringIO())
        console.print(view)
        for shown in (view.html(), console.export_text()):
            assert f"Sequence {row} of 2, counted from 0; sequence=... shows another." in shown
    assert "Sequence" not in visualize(generated(**tiny_models.prompts([6])), TOKENIZER).html()
    with pytest.raises(IndexError, match="no sequence 2: the output has 2"):
        visualize(output, TOKENIZER, sequence=2)


def test_in_a_terminal():
    statistics = SequenceStatistics([2, 0], [1, 0], [Origin.LOSSLESS, Origin.RECOVERED, Origin.PLAIN], [0, 0.2, 0])
    console = Console(record=True, width=120, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Visualization(["one", " two", " three"], statistics))
    text = console.export_text(clear=False)
    assert text.startswith("one two three\n") and "1  drawn again after a rejection" in text
    assert "mean accepted length 0.50" in text
    assert "background-color" in console.export_html()


def test_a_reply_of_a_conversation():
    reply = Reply("", generated(**tiny_models.prompts([6])), 6, 0)
    assert visualize(reply, TOKENIZER) == visualize(reply.output, TOKENIZER)
    with pytest.raises(TypeError, match=r"tokenizer, which has decode\(\), got NoneType"):
        visualize(reply, None)


def test_an_output_without_statistics():
    with pytest.raises(TypeError, match="return_dict_in_generate=True"):
        visualize(torch.ones(1, 3), TOKENIZER)
