"""Prompts of mixed lengths, from the user's or the package's own."""

from collections.abc import Sequence

from hydrajax.certify.servers.questions import Content, Question
from hydrajax.errors import HydrajaxError
from hydrajax.text.built_in import BEGINNINGS, QUESTIONS
from hydrajax.text.prompt import Prompt

SHARES = (1.0, 0.25, 0.75, 0.125, 0.5)  # of the limit of new tokens


def built_in_contents() -> list[tuple[Content, bool]]:
    """Return the package's own prompts, each with whether it is a question."""
    asked = [(text, True) for text in QUESTIONS.values()]
    begun = [(text, False) for text in BEGINNINGS.values()]
    return [each for pair in zip(begun, asked, strict=False) for each in pair] + asked[len(begun) :]


def contents_of(prompts: Sequence[Prompt]) -> list[tuple[Content, bool]]:
    """Return the contents of prompts from a file. Raises `HydrajaxError` for an empty list."""
    if not prompts:
        raise HydrajaxError("prompts: got none, expected at least one")
    texts = [each.content if isinstance(each.content, str) else tuple(each.content) for each in prompts]
    return [(text, each.chat) for text, each in zip(texts, prompts, strict=True)]  # type: ignore[misc]


def questions_of(
    contents: Sequence[tuple[Content, bool]], number: int, max_tokens: int, chats: bool, completions: bool = True
) -> list[Question]:
    """Return greedy questions of mixed lengths, all different.

    Questions become chats, and in every second round the other texts too. A later round puts earlier texts before a
    text, which makes longer prompts.

    Args:
        contents: texts or token ids, each with whether it is a user's message.
        max_tokens: limit of new tokens of the longest answers.
    """
    found: list[Question] = []
    for index in range(number):
        round_, at = divmod(index, len(contents))
        content, asked = contents[at]
        if isinstance(content, str):
            before = [contents[(at + shift) % len(contents)][0] for shift in range(1, round_ % 5 + 1)]
            texts = [text for text in before if isinstance(text, str)]
            head = f"# {round_}\n" if round_ else ""
            content = head + "\n".join([*texts, content])
            chat = chats and (asked != bool(round_ % 2) or not completions)
        else:
            chat = False
        share = SHARES[(index + round_) % len(SHARES)]
        if chat or completions:
            found.append(Question(content, chat, max(4, round(max_tokens * share))))
    return found


def long_texts(seed: int, size: int) -> tuple[str, list[str]]:
    """Return a long text, and texts that begin with it."""
    texts = [*BEGINNINGS.values(), *QUESTIONS.values()]
    body = "\n".join(f"{number}. {texts[number % len(texts)]}" for number in range(size // 40 + 1))
    head = f"Notes, part {seed}.\n{body}"[:size].rstrip()
    return head, [f"{head}\n\n{text}" for text in texts]
