"""A conversation in which both models keep what they have read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import _compat
from .cache import RaggedCache
from .configuration import RunOptions, resolved
from .integration import generate
from .outputs import AcceptanceStatistics
from .settings import CallSettings


@dataclass(frozen=True)
class Reply:
    """An answer in a [`Conversation`]."""

    text: str
    """The answer, without special tokens."""
    output: Any
    """What `generate` returned, with `acceptance` in it."""
    prompt_tokens: int
    """Tokens of the whole conversation before the answer."""
    remembered_tokens: int
    """How many of them the verifier still had in its cache, so that they were not read again."""

    @property
    def acceptance(self) -> AcceptanceStatistics | None:
        """Acceptance statistics of the answer; `None` without a draft, or where `cactus_delta=None` turned it off."""
        statistics: AcceptanceStatistics | None = self.output.get("acceptance")
        return statistics


class Conversation:
    """A chat with a verifier and a draft: each turn feeds only what is new to either model.

    The whole history is put through the chat template at every turn, and whatever differs from what was read before
    (some templates drop parts of earlier answers) is read again from there on.

    Args:
        verifier (`PreTrainedModel`): A decoder-only chat model.
        draft (`PreTrainedModel`, *optional*): The draft. Without one, pass `prompt_lookup_num_tokens` to `send`.
        tokenizer (`PreTrainedTokenizerBase`): The verifier's, with a chat template.
        system (`str`, *optional*): A system message.

    Raises:
        ValueError: If the tokenizer has no chat template.
        TypeError: If the system message is no text.

    Example:
        ```python
        conversation = Conversation(verifier, draft, tokenizer)
        print(conversation.send("What is a cactus?", do_sample=True, cactus_delta=0.5, max_new_tokens=100).text)
        print(conversation.send("Where does it grow?", do_sample=True, cactus_delta=0.5, max_new_tokens=100).text)
        ```
    """

    def __init__(
        self,
        verifier: PreTrainedModel,
        draft: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
    ):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("a conversation needs a tokenizer with a chat template.")
        if system is not None:
            _check_text("the system message", system)
        self.verifier = verifier
        self.draft = draft
        self.tokenizer = tokenizer
        self.system = system
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self._cache: RaggedCache | None = None
        self._read: list[int] = []

    def send(self, text: str, **options: Any) -> Reply:
        """Adds what the user says, and answers.

        Args:
            text (`str`): What the user says.
            **options: For `generate`: the `cactus_*` options, sampling, `streamer`, `stopping_criteria` ... Without a
                `cactus_*` option anywhere, `cactus_delta=0`, which is lossless.

        Returns:
            [`Reply`]: The answer, which is part of the conversation from now on.

        Raises:
            TypeError, ValueError: If an option is wrong. The conversation is then as it was before.
        """
        _check_text("what the user says", text)
        if not options.get("return_dict_in_generate", True):
            raise ValueError("a conversation needs the whole output: leave out return_dict_in_generate=False.")
        setting = CallSettings(self.verifier, {"assistant_model": self.draft, **options}, RunOptions())
        answers = setting["num_return_sequences"] or 1
        if answers != 1:
            raise ValueError(f"a conversation goes on from one answer: num_return_sequences must be 1, got {answers}.")
        messages = [*self.messages, {"role": "user", "content": text}]
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = encoded["input_ids"].to(_compat.input_device(self.verifier))
        call: dict[str, Any] = {"assistant_model": self.draft, "return_dict_in_generate": True, **options}
        given = {name: value for name, value in options.items() if name.startswith("cactus_")}
        said, rule = resolved(self.verifier.generation_config, options.get("generation_config"), given)
        if setting.has_draft() and not said:
            call["cactus_delta"] = 0.0
        elif setting.has_draft() and rule is None:
            # With a draft, transformers' own loop feeds the whole prompt behind what a cache holds of it.
            self._cache = None
        cache, self._cache = self._remembered(ids), None
        if cache is not None:
            call[_compat.cache_argument(self.verifier)] = cache
        remembered = 0 if cache is None else cache.get_seq_length()
        output = generate(self.verifier, input_ids=ids, attention_mask=torch.ones_like(ids), **call)
        kept = output.get(_compat.cache_argument(self.verifier))
        # Only this package's cache can be continued without its text being read again.
        self._cache = kept if isinstance(kept, RaggedCache) else None
        self._read = output.sequences[0].tolist()
        answer = self.tokenizer.decode(self._read[ids.shape[1] :], skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return Reply(answer, output, ids.shape[1], remembered)

    def _remembered(self, ids: Tensor) -> RaggedCache | None:
        """The cache, rolled back to what it has in common with a prompt; `None` where that is nothing."""
        cache, prompt = self._cache, ids[0].tolist()
        if cache is None:
            return None
        known = cache.get_seq_length()
        # The first round needs a token to feed.
        common = min(known, len(prompt) - 1)
        common = next((i for i in range(common) if prompt[i] != self._read[i]), common)
        if common < known:
            cache.crop(common - known)
        return cache if common else None


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, got {type(text).__name__}: one message, not a list of them.")
