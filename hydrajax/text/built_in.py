"""Prompts for measurements for which the user gives none, written for this package."""

from typing import Any

from hydrajax.errors import HydrajaxError
from hydrajax.text.prompt import Prompt
from hydrajax.text.templates import run_template

BEGINNINGS = {
    "quicksort": "def quicksort(items):\n",
    "stack": "class Stack:\n    def __init__(self):\n",
    "physics": "The three laws of motion say that",
    "letter": "Write a short letter to a friend about a walk by the sea.\n",
}
QUESTIONS = {
    "writing": "Write a short letter to a neighbour who watered your plants while you were away.",
    "reasoning": "Ann is taller than Ben, and Ben is taller than Cleo. Who is the shortest? Explain your answer.",
    "maths": "A train travels 180 km in 2 hours and then 60 km in 1 hour. What is its average speed? Show each step.",
    "coding": "Write a Python function that returns the second largest number of a list.",
    "extraction": "List the names and dates in this text: Marta visited Lisbon on 3 May 2019, and her brother Tom "
    "followed on 12 June 2020.",
    "translation": "Translate into French: The library opens at nine and closes at six.",
    "summarising": "Summarise in one sentence: Bees visit flowers to collect nectar. Meanwhile they carry pollen from "
    "flower to flower, which lets the plants form seeds and fruit. Many crops depend on this work.",
}


def built_in_prompts(tokenizer: Any) -> list[Prompt]:
    """Return questions if the tokenizer's chat template marks the roles, else beginnings of texts."""
    asked = _marks_roles(tokenizer)
    texts = QUESTIONS if asked else BEGINNINGS
    return [Prompt(text, f"built-in prompt '{name}'", chat=asked) for name, text in texts.items()]


def _marks_roles(tokenizer: Any) -> bool:
    """Return whether the chat template adds anything to a message; that of a base without chat training may not."""
    if not tokenizer.chat_template:
        return False
    message = [{"role": "user", "content": "text"}]
    try:
        rendered = run_template(tokenizer.apply_chat_template, message, tokenize=False, add_generation_prompt=True)
    except HydrajaxError:  # a template that refuses this message
        return False
    return rendered != "text"
