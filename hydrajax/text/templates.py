"""Chat templates: encode messages with a tokenizer's own template or a built-in one."""

import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from hydrajax.errors import HydrajaxError, not_allowed, one_line
from hydrajax.text.tokenizer import run_tokenizer

Content = str | Sequence[Mapping[str, Any]]  # a text, or parts of type text
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

# Vicuna's default system message.
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# Jinja, without BOS: the tokenizer adds it as to any text.
BUILT_IN = {
    # Vicuna v1.1: SYSTEM USER: question ASSISTANT: answer</s>USER: question ASSISTANT: answer</s>
    "vicuna": (
        "{% if messages[0].role != 'system' %}{{ '" + VICUNA_SYSTEM.replace("'", "\\'") + " ' }}{% endif %}"
        "{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content + ' ' }}"
        "{% elif message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + message.content + eos_token }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    # For a base without chat training: the messages in order, each answer closed by EOS.
    "plain": (
        "{% for message in messages %}"
        "{{ message.content + (eos_token if message.role == 'assistant' else '\n') }}"
        "{% endfor %}"
    ),
    # For a base that continues a text, such as the first lines of a function. White space at the end is removed: many
    # tokenizers merge a line break with the indentation after it, so that one alone is rare in training data.
    "raw": (
        "{% for message in messages %}"
        "{{ message.content + eos_token if message.role == 'assistant' else message.content.rstrip() }}"
        "{% endfor %}"
    ),
}


@dataclass(frozen=True)
class PromptEncoder:
    """A tokenizer and a chat template; `make_encoder` makes it.

    Attributes:
        source: the template, as Jinja text.
        own: the template is the tokenizer's own, which writes BOS itself; the built-in ones leave BOS to the tokenizer.
        special: pattern that finds the text of any special token.
        marks: int32 ids of all tokens added to the vocabulary, special or not; one of them ends a turn.
        variables: of the template, and ``continue_final_message`` of transformers.
    """

    tokenizer: Any
    source: str
    own: bool
    special: re.Pattern
    marks: Int[np.ndarray, " n"]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Return token ids of the messages (``role``, ``content``) and of the header of the next answer.

        Args:
            tools: functions that the model may call, as `transformers` describes them.

        Raises:
            HydrajaxError: for a template that fails or leaves out a message, and with tools for one that ignores them.
        """
        header = not self.variables.get("continue_final_message")
        text = self.render(messages, prompt=header, tools=tools)
        if tools and text == self.render(messages, prompt=header):
            raise HydrajaxError("tools: the chat template ignores tools; leave them out, or set tool_choice to none")
        return self.tokenize(text)[0].tolist()

    def source_for(self, tools: Tools) -> str:
        """Return the template for a conversation with or without tools; some tokenizers have one for each."""
        return run_template(self.tokenizer.get_chat_template, tools=tools) if self.own and tools else self.source

    def with_variables(self, variables: Mapping[str, Any], tools: Tools = None) -> "PromptEncoder":
        """Return the encoder with variables. Raises `HydrajaxError` for one that the template does not have."""
        if unknown := next((name for name in variables if name not in self.names(tools)), None):
            raise HydrajaxError(f"chat_template_kwargs: got {unknown}, which is no variable of the chat template")
        if found := self.special.search(json.dumps(variables, ensure_ascii=False, default=str)):
            raise HydrajaxError(f"chat_template_kwargs: contains the special token {found[0]}, expected plain text")
        return replace(self, variables={**self.variables, **variables})

    def names(self, tools: Tools = None) -> frozenset[str]:
        """Return the template's variables that transformers does not set."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return _variables(self.source_for(tools)) - {"messages", *own, *self.tokenizer.special_tokens_map}

    def header(self, messages: Messages, tools: Tools = None) -> str:
        """Return the text that begins the next answer."""
        text, before = (self.render(messages, prompt=prompt, tools=tools) for prompt in (True, False))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
        return text[len(list(same)) :]

    def render(self, messages: Messages, *, prompt: bool, tools: Tools = None) -> str:
        """Return the messages as text, with ``prompt`` followed by the header of the next answer."""
        render = partial(
            run_template,
            self.tokenizer.apply_chat_template,
            tools=tools or None,
            chat_template=self.source_for(tools),
            tokenize=False,
            add_generation_prompt=prompt,
            **self.variables,
        )
        return render(readable_messages(render, messages))

    def tokenize(self, text: str) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, "n 2"]]:
        """Return the token ids of rendered text, int32, and the first and last offset of each token in the text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise HydrajaxError("is not valid Unicode text (it contains a lone surrogate)") from None
        encoded = run_tokenizer(
            self.tokenizer, text, add_special_tokens=not self.own, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["offset_mapping"])
        written = np.flatnonzero(offsets.reshape(-1, 2)[:, 1])
        if not len(written):
            raise HydrajaxError("messages: the chat template writes an empty text, expected messages with some text")
        length = int(written[-1]) + 1  # without the EOS that some tokenizers add
        if length > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            raise HydrajaxError("the chat template writes BOS twice")
        return ids[:length], offsets[:length]


def make_encoder(
    tokenizer: Any, template: str = "auto", *, field: str = "template", tokenizer_field: str = "base"
) -> PromptEncoder:
    """Return an encoder of conversations.

    Args:
        template: ``auto`` for the tokenizer's own, a name in `BUILT_IN`, or the path of a file in Jinja, which like the
            tokenizer's own writes BOS itself.
        field, tokenizer_field: the options or settings that named template and tokenizer, for messages.

    Raises:
        HydrajaxError: for a template or a tokenizer that cannot be used.
    """
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise HydrajaxError(f"{tokenizer_field}: got {kind}, expected a fast tokenizer, which has offsets")
    if template != "auto" and template not in BUILT_IN:
        tokenizer, template = _with_template(tokenizer, template, field), "auto"
    source = _own_template(tokenizer, field) if template == "auto" else BUILT_IN[template]
    if template != "auto" and not tokenizer.eos_token:
        raise HydrajaxError(f"{field}: {template} ends answers with EOS, but the tokenizer has no EOS token")
    added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    pattern = "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True))
    marks = sorted({*added, *tokenizer.all_special_ids})
    return PromptEncoder(
        tokenizer, source, template == "auto", re.compile(pattern or "(?!)"), np.array(marks, np.int32)
    )


def text_of(content: Content) -> str:
    """Return the text of a message's content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@lru_cache(maxsize=8)
def _variables(source: str) -> frozenset[str]:
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    tree = run_template(
        environment.parse, re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
    )  # a tag of transformers
    return frozenset(meta.find_undeclared_variables(tree) - {*environment.globals, "raise_exception", "strftime_now"})


def _one_part(content: Content) -> Content:
    return [{"type": "text", "text": text_of(content)}]


def readable_messages(render: Callable[[Messages], str], messages: Messages) -> Messages:
    """Return the messages with contents in a form that a chat template reads: as they are, or the other form.

    Many templates read either texts or lists of parts, and silently write nothing for the other form. The template is
    therefore run on the same messages with marks in place of their texts.

    Args:
        render: the template; raises `HydrajaxError` if it fails.
        messages: the conversation; each content is a text or a list of parts of type text.

    Raises:
        HydrajaxError: for a message that the template leaves out in any form, unless it is an answer.
    """
    found, unread, refused = list(messages), range(len(messages)), True
    for form in (lambda content: content, _one_part, text_of):
        for number in unread:
            found[number] = messages[number] | {"content": form(messages[number]["content"])}
        try:
            text = render([_marked(number, message) for number, message in enumerate(found)]).casefold()
        except HydrajaxError:  # a template may refuse this form, or these messages in any form
            continue
        refused, unread = False, [number for number in unread if not _is_read(number, found[number]["content"], text)]
        if not unread:
            return found
    # Templates may cut an earlier answer's reasoning, or write its tool calls without its text.
    lost = [number for number in unread if messages[number]["role"] != "assistant"]
    if lost and not refused:
        role = messages[lost[0]]["role"]
        raise HydrajaxError(f"messages.{lost[0]}: the chat template leaves out messages of role {role}; remove it")
    return messages if refused else found


def _marked(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with marks in place of its texts. Parts have a field that templates only write as JSON."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content and f"q{number}x0z"}
    parts = [{**part, "text": f"q{number}x{index}z", "form": f"form{number}z"} for index, part in enumerate(content)]
    return message | {"content": parts}


def _is_read(number: int, content: Content, text: str) -> bool:
    marks = len(content[:1] if isinstance(content, str) else content)
    return f"form{number}z" not in text and all(f"q{number}x{index}z" in text for index in range(marks))


def _with_template(tokenizer: Any, file: str, field: str) -> Any:
    """Return a copy of the tokenizer with the chat template in a file."""
    from jinja2 import TemplateSyntaxError

    if not Path(file).is_file():
        raise not_allowed(field, file, ("auto", *BUILT_IN), " or a file in Jinja")
    tokenizer = copy.copy(tokenizer)
    try:
        tokenizer.chat_template = Path(file).read_text("utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise HydrajaxError(f"{field}: {file}, line {error.lineno}: {one_line(error.message or '')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HydrajaxError(f"{field}: {file} cannot be read as text ({one_line(error)})") from None
    except Exception:  # a template may refuse this conversation
        pass
    if not tokenizer.chat_template.strip():
        raise HydrajaxError(f"{field}: {file} is empty, expected a chat template in Jinja")
    return tokenizer


def _own_template(tokenizer: Any, field: str) -> str:
    if not tokenizer.chat_template:
        plain = "--template plain" if field == "template" else f"{field}=plain"
        raise HydrajaxError(
            f"{field}: the tokenizer has no chat template; choose one of {', '.join(BUILT_IN)}; "
            f"for a base without chat training {plain}"
        )
    try:
        return tokenizer.get_chat_template()  # of several, its default
    except ValueError as error:
        raise HydrajaxError(f"{field}: {one_line(error)}") from None


def run_template(render: Callable, *args, **settings) -> Any:
    """Call ``render`` and raise any error of the template as a `HydrajaxError`."""
    try:
        return render(*args, **settings)
    except Exception as error:  # templates are programs and may raise anything
        raise HydrajaxError(f"the chat template failed: {one_line(error)}") from None
