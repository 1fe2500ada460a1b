"""Questions, fake decoders and runs with them, for the tests of questions, answer files and statistics."""

import json

from hydrajax.bench.questions.answer_files import AnswerFiles
from hydrajax.bench.questions.asking import Prompter, evaluate
from hydrajax.bench.questions.sets import Question
from hydrajax.text.answers import Generation

QUESTIONS = [
    Question(81, "writing", ("one", "two")),
    Question(82, "math", ("three",)),
    Question(83, "writing", ("four", "five", "six")),
    Question("x/4", "math", ("seven",)),
]
SETTINGS = {"rule": "greedy", "tree": [[0], [0, 0]]}
PLAIN, FAST = "tiny-autoregressive", "tiny-hydra"


class Decoder:
    """Emit the sum and the count of the prompt ids and three more tokens; a step takes 10 ms and emits ``per_step``.

    calls: its prompts and seeds. log: a shared list that receives the name at every call.
    """

    def __init__(self, name: str, per_step: int, log: list[str] | None = None):
        self.model_id, self.per_step, self.calls, self.log = name, per_step, [], [] if log is None else log

    def decode(self, ids: list[int], seed: int) -> Generation:
        self.calls.append((ids, seed))
        self.log.append(self.model_id)
        output = [sum(ids) % 97, len(ids) % 97, seed % 97, 5, 6]
        steps = -(-len(output) // self.per_step)
        lengths = [min(self.per_step, len(output) - step * self.per_step) for step in range(steps)]
        text = f" says {' '.join(map(str, output))} ü\n"
        return Generation(ids, output, text, steps, lengths, len(output), 0.01 * steps, "length")


def words(messages: list[dict[str, str]]) -> list[int]:
    """Return BOS (1), the role and one id per character."""
    return [1] + [ord(c) for m in messages for c in f"{m['role']}:{m['content']}\n"]


PROMPTER = Prompter(words, context=256, max_new_tokens=56, bos_id=1)


def run(folder, questions=QUESTIONS, fast=2, settings=SETTINGS, **more) -> AnswerFiles:
    decoders = Decoder(PLAIN, 1), Decoder(FAST, fast)
    files = AnswerFiles(folder, [PLAIN, FAST], settings)
    evaluate(questions, decoders, PROMPTER, files, **more)
    return files


def lines_of(folder, model_id):
    return [json.loads(line) for line in (folder / f"{model_id}.jsonl").read_text().splitlines()]


def without_chance(record: dict) -> dict:
    """Return a line without its time stamp and random id."""
    return {key: value for key, value in record.items() if key not in ("answer_id", "tstamp")}
