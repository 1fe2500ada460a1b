"""Token ids from prompts and conversations."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hydrajax.decoding.forbidden import TokenIds, token_sequences
from hydrajax.decoding.prompt_batch import encode_prompt
from hydrajax.errors import HydrajaxError
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.serve.call_formats import call_format, separate_tokens
from hydrajax.serve.default_tools import prompt_with_tools
from hydrajax.serve.harmony import Harmony
from hydrajax.serve.protocol import TemplateFields
from hydrajax.serve.reasoning import HARMONY, Thinking
from hydrajax.serve.tool_calls import CallFormat
from hydrajax.text.continuation import Continuation
from hydrajax.text.prompt import Prompt
from hydrajax.text.templates import Messages, PromptEncoder, Tools, make_encoder, text_of
from hydrajax.text.tokenizer import run_tokenizer

USER = [{"role": "user", "content": "a"}]


class RequestEncoder:
    """Encode and check prompts and conversations. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        config: LlamaConfig,
        template: str = "auto",
        max_prompt: int | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        variables: Mapping[str, Any] = {},
    ):
        """Build the encoder.

        Args:
            tokenizer: the base's, or None for token ids only.
            config: the base's.
            template: chat template, as in `hydrajax.conversation.Chat`. With ``auto`` and a tokenizer that has no
                template, only conversations are refused.
            max_prompt: longest prompt in tokens.
            tool_parser: format of tool calls, a name in `hydrajax.serve.call_formats.NAMES`.
            reasoning_parser: format of the reasoning, a name in `hydrajax.serve.reasoning.PARSERS`.
            variables: of the chat template, unless a request sets them.

        Raises:
            HydrajaxError: for a named template or a parser that cannot be used, and for unknown variables.
        """
        # A copy, because encoding may change the settings of the tokenizer that the batcher's thread decodes with.
        self._tokenizer, self._config, self._max_prompt = copy.deepcopy(tokenizer), config, max_prompt
        self.vocab_size = config.vocab_size
        self._most_bytes = _most_bytes(self._tokenizer, min(max_prompt or config.max_positions, config.max_positions))
        self._no_template, self._chat, self._tool_parser = "", None, tool_parser
        try:
            if self._tokenizer is None:
                raise HydrajaxError("the base has no tokenizer; give token ids to /v1/completions")
            self._chat = make_encoder(self._tokenizer, template)
        except HydrajaxError as error:
            if template != "auto":
                raise
            self._no_template = f"messages: {str(error).removeprefix('template: ')}"
        self._reasoning_parser = reasoning_parser
        if self._chat is not None:
            self._chat = self._chat.with_variables(variables)
            _ = self.thinking  # checks the parser
        if tool_parser != "auto" and self._chat is not None:
            self.call_format()  # checks it

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def prompt(self, content: str | list[int], add_special_tokens: bool = True) -> np.ndarray:
        """Encode a text, by default with the tokenizer's BOS, or check token ids; int32 ``[P]``."""
        if isinstance(content, str):
            self._check_bytes([content], "prompt")
        ids = Prompt(content, "prompt").ids(self._tokenizer, add_special_tokens)
        return self._checked(ids, "prompt")

    def words(self, bad_words: Sequence[str]) -> list[TokenIds]:
        """Return `hydrajax.decoding.forbidden.token_sequences`."""
        return token_sequences(self._tokenizer, bad_words)

    def conversation(
        self, messages: Messages, tools: Tools = None, fields: TemplateFields | None = None
    ) -> tuple[np.ndarray, Thinking | None]:
        """Encode messages, and the tools that the model may call, up to the start of the answer.

        Returns:
            Token ids int32 ``[P]``, and the reader of the answer's reasoning, None if it has none.
        """
        chat, fields = self._chat_encoder(), fields or TemplateFields()
        chat = chat.with_variables(fields.variables(chat.names(tools)), tools)
        if fields.continue_final_message:
            chat = replace(chat, variables={**chat.variables, "continue_final_message": True})
        texts = [_text_of(message) for message in messages]
        added = "".join(json.dumps(one, ensure_ascii=False) for one in (tools, fields.chat_template_kwargs) if one)
        self._check_bytes([*texts, added], "messages")
        for number, text in enumerate(texts):
            if found := chat.special.search(text):
                raise HydrajaxError(f"messages.{number}: contains the special token {found[0]}, expected plain text")
        if found := chat.special.search(added):
            raise HydrajaxError(f"tools: contains the special token {found[0]}, expected plain text")
        source, of_tools = chat.source_for(tools), any("tool_calls" in m or m["role"] == "tool" for m in messages)
        described = not ((tools and "tools" not in source) or (of_tools and "tool" not in source))
        ids = chat.prompt(messages, tools) if described else prompt_with_tools(chat, messages, tools)
        if (thinking := self.thinking) is None:
            return self._checked(ids, "messages"), None
        if fields.continue_final_message:
            header = text_of(messages[-1]["content"])
        else:
            header = chat.header(messages, tools) if described else chat.header(USER)
        return self._checked(ids, "messages"), thinking.after(header)

    def call_format(self, forced: bool = False) -> CallFormat:
        """Return the format of tool calls: ``tool_parser``, or the one that the chat template describes.

        ``forced``: answers are calls whatever the template describes.
        """
        chat = self._chat_encoder()
        # To name the template for tools; which ones does not matter.
        return self.harmony or call_format(chat.source_for([{}]), self._tokenizer, self._tool_parser, forced)

    @cached_property
    def harmony(self) -> Harmony | None:
        """The format of all answers to conversations; None if they are free text."""
        named = self._tool_parser in ("auto", "openai") and self._reasoning_parser in ("auto", HARMONY)
        found = Harmony.of(self._chat_encoder().source, self._tokenizer) if named else None
        if found is None and self._reasoning_parser == HARMONY:
            raise HydrajaxError(f"reasoning_parser: got {HARMONY}, but the chat template has no channels")
        return found

    @cached_property
    def thinking(self) -> Thinking | None:
        """The format of a reasoning before the content, None for none."""
        chat = self._chat_encoder()
        return None if self.harmony else Thinking.of(self._reasoning_parser, chat.source, self._tokenizer)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The ids of added tokens that no text under a grammar contains."""
        return {} if self._tokenizer is None else separate_tokens(self._tokenizer)

    def _chat_encoder(self) -> PromptEncoder:
        if self._chat is None:
            raise HydrajaxError(self._no_template)
        return self._chat

    def text(self, content: str | list[int]) -> str:
        """Return a prompt's text, of token ids with special tokens."""
        if isinstance(content, str):
            return content
        if self._tokenizer is None:
            raise HydrajaxError("tokens: the base has no tokenizer to write them as text")
        if wrong := [token for token in content if not 0 <= token < self.vocab_size]:
            raise HydrajaxError(f"tokens: got token id {wrong[0]}, expected 0 to {self.vocab_size - 1}")
        return self._tokenizer.decode(content, clean_up_tokenization_spaces=False)

    def after(self, prompt: Sequence[int] | None) -> Continuation:
        """Return the continuation of a prompt, None for one that ends with a word."""
        return Continuation(self._tokenizer, prompt)

    def _check_bytes(self, contents: Sequence[str], field: str) -> None:
        """Refuse before tokenizing a text that must have too many tokens."""
        size = sum(len(content.encode(errors="surrogatepass")) for content in contents)
        if self._most_bytes is not None and size > self._most_bytes:
            raise HydrajaxError(f"{field}: got {size} bytes, expected at most {self._most_bytes}; shorten the text")

    def _checked(self, ids: list[int], field: str) -> np.ndarray:
        if self._max_prompt is not None and len(ids) > self._max_prompt:
            raise HydrajaxError(f"{field}: got {len(ids)} tokens, expected at most {self._max_prompt}")
        return encode_prompt(Prompt(ids, field), field, None, self._config)


def _text_of(message: dict[str, Any]) -> str:
    """Return everything in a message that a client writes."""
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    return text_of(message["content"]) + (json.dumps(others, ensure_ascii=False) if others else "")


def _most_bytes(tokenizer: Any, most_tokens: int) -> int | None:
    """Return how many bytes a text of ``most_tokens`` tokens has at most; None without a tokenizer.

    First encodes a text, which resets the padding and truncation of a tokenizer that has any. Later calls change
    nothing in it, so threads can share it.
    """
    if tokenizer is None:
        return None
    run_tokenizer(tokenizer, "a", where="base: ")
    return most_tokens * max(len(token.encode()) for token in tokenizer.get_vocab())
