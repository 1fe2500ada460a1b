"""Write the training text of the heads for SmolLM2, from training sets: seed conversations, and answered questions.

    python experiments/real_model_text.py PROMPTS_DIR --seeds runs/smollm2/seeds.jsonl
    hydrajax distill --config experiments/configs/smollm2/distill.yaml --seeds runs/smollm2/seeds.jsonl \\
        --output runs/smollm2/answers.jsonl --new-tokens 256
    python experiments/real_model_text.py PROMPTS_DIR --texts runs/smollm2/texts.jsonl
    python experiments/real_model_text.py PROMPTS_DIR --languages LANGUAGES_DIR --begin runs/smollm2/languages.jsonl

Seeds are user turns, which the base answers itself. Texts are questions with the answers of the training set: heads can
learn the base's distribution on any text, and reading one is five times as fast as writing it (on two cores). Both are
shuffled. PROMPTS_DIR holds the files of `SOURCES`. No evaluation set is among them: MT-Bench, Spec-Bench, HumanEval,
AlpacaEval and the test half of GSM8K stay unseen.

LANGUAGES_DIR has one folder of Markdown per language of `LANGUAGES`, such as the documentation of a project that is
translated. Its sentences become user messages, which ask for a translation, and beginnings of user messages, which the
base completes (real_model_dialogues.py --begin).
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from hydrajax.formats.hub import resolve
from hydrajax.text.templates import make_encoder
from hydrajax.text.tokenizer import load_tokenizer

# Second user turns, as a conversation asks them; a dialogue takes one at random.
FOLLOW_UPS = (
    "Can you explain that in more detail?",
    "Now say the same in one short paragraph.",
    "Give me an example.",
    "Rewrite your answer as a list of bullet points.",
    "Are you sure? Check it step by step.",
    "Explain it to a ten-year-old.",
    "What are the most common mistakes here?",
    "Rewrite it in a more formal tone.",
    "What would you change, and why?",
    "Summarize your answer in a single sentence.",
)
FOLLOWED = 0.35  # share of the single questions that get a second turn
MOST = 2500  # conversations of one source, so that arithmetic and code do not crowd out the rest
SHORT = 3000  # characters of a conversation's user turns, so that answers fit the training rows


def question(*parts: str) -> str:
    """Join an instruction and its input, which may be blank."""
    return "\n\n".join(part for part in parts if part.strip())


def gsm8k(path: Path) -> Iterator[list[str]]:
    """Questions of the training half, one or two to a conversation."""
    questions = [json.loads(line)["question"] for line in path.open(encoding="utf-8")]
    at = 0
    while at < len(questions):
        take = 2 if at % 5 == 0 else 1
        yield questions[at : at + take]
        at += take


def instructions(path: Path) -> Iterator[list[str]]:
    """GPTeacher's records: an instruction and its input."""
    for record in json.loads(path.read_text(encoding="utf-8")):
        yield [question(record["instruction"], record.get("input", ""))]


def alpaca_seeds(path: Path) -> Iterator[list[str]]:
    for line in path.open(encoding="utf-8"):
        record = json.loads(line)
        for instance in record["instances"]:
            yield [question(record["instruction"], instance["input"])]


def open_assistant(path: Path) -> Iterator[list[str]]:
    """The user's messages on every path from a root to a leaf of OpenAssistant's trees."""

    def paths(node, turns):
        turns = [*turns, node["text"]] if node["role"] == "prompter" else turns
        if not node["replies"]:
            yield turns
        for reply in node["replies"]:
            yield from paths(reply, turns)

    for line in path.open(encoding="utf-8"):
        yield from paths(json.loads(line)["prompt"], [])


SOURCES = {
    "gpteacher_roleplay.json": instructions,
    "gpteacher_codegen.json": instructions,
    "gsm8k_train.jsonl": gsm8k,
    "openassistant_en_100_tree.jsonl": open_assistant,
    "stanford_alpaca_seed_tasks.jsonl": alpaca_seeds,
}


def conversations(folder: Path, seed: int) -> list[dict]:
    """Return all conversations in random order; each distinct list of turns once."""
    random_ = random.Random(seed)
    found: dict[tuple[str, ...], str] = {}
    for name, read in SOURCES.items():
        source = list(read(folder / name))
        random_.shuffle(source)
        for turns in source[:MOST]:
            turns = [turn.strip() for turn in turns if turn.strip()]
            if len(turns) == 1 and random_.random() < FOLLOWED:
                turns.append(random_.choice(FOLLOW_UPS))
            if turns and sum(map(len, turns)) <= SHORT:
                found.setdefault(tuple(turns), name)
    records = [{"category": name, "turns": list(turns)} for turns, name in found.items()]
    random_.shuffle(records)
    return [{"question_id": number} | record for number, record in enumerate(records)]


def questions_and_answers(folder: Path) -> Iterator[tuple[str, str]]:
    """Questions with the answers of the training set: GSM8K's without its marks, and GPTeacher's."""
    for line in (folder / "gsm8k_train.jsonl").open(encoding="utf-8"):
        record = json.loads(line)
        yield record["question"], re.sub(r"<<.*?>>", "", record["answer"]).replace("####", "Answer:")
    for name in ("gpteacher_roleplay.json", "gpteacher_codegen.json"):
        for record in json.loads((folder / name).read_text(encoding="utf-8")):
            yield question(record["instruction"], record.get("input", "")), record["response"]


def texts(folder: Path, base: str, limit: int, seed: int) -> Iterator[dict]:
    """Encode questions and answers in the base's chat template, in random order, up to ``limit`` tokens."""
    tokenizer = load_tokenizer(resolve(base, "base"))
    encoder = make_encoder(tokenizer, "auto")
    pairs = list(questions_and_answers(folder))
    random.Random(seed).shuffle(pairs)
    done = 0
    for asked, answer in pairs:
        if done >= limit or not answer.strip():
            continue
        prompt = encoder.prompt([{"role": "user", "content": asked}])
        output = [*tokenizer(answer.strip(), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        done += len(prompt) + len(output)
        yield {"prompt_ids": prompt, "output_ids": output}


LANGUAGES = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese"}
SENTENCE = re.compile(r"[^\W\d_][^\n`*<>{}|\[\]()#]{40,240}[.!?]")  # of prose: without markup and links


def sentences(folder: Path) -> list[str]:
    """Return the sentences of all Markdown files, outside code blocks, each once."""
    found = []
    for path in sorted(folder.rglob("*.md")):
        for line in re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines():
            found += [match.strip() for match in SENTENCE.findall(line)]
    return list(dict.fromkeys(found))


def in_languages(folder: Path, seed: int) -> list[dict]:
    """Return, in random order, half of the sentences to translate and half as beginnings of a message."""
    random_, records = random.Random(seed), []
    for code, language in LANGUAGES.items():
        for number, sentence in enumerate(sentences(folder / code)):
            if number % 2:
                words = sentence.split()
                records.append({"begin": " ".join(words[: random_.randint(3, max(3, len(words) - 2))])})
            else:
                asked = f"Translate {language} to English: {sentence}", f"{sentence}\n\nTranslate this to English."
                records.append({"turns": [asked[number % 4 == 0]]})
    random_.shuffle(records)
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="directory of the source files")
    parser.add_argument("--seeds", type=Path, help="write one conversation per line, for hydrajax distill")
    parser.add_argument("--texts", type=Path, help="write one answered question per line, for data.format: generations")
    parser.add_argument("--languages", type=Path, help="directory with a folder of Markdown per language")
    parser.add_argument("--begin", type=Path, help="write one user message, or the beginning of one, per line")
    parser.add_argument("--base", default="smollm2", help="the texts' tokenizer (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=600_000, help="limit of the texts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args()
    if args.begin is not None and args.languages is None:
        parser.error("--begin needs --languages")
    for path, records in (
        (args.seeds, lambda: conversations(args.prompts, args.seed)),
        (args.begin, lambda: in_languages(args.languages, args.seed)),
        (args.texts, lambda: texts(args.prompts, args.base, args.tokens, args.seed)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(record) for record in records()]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{path}: {len(lines)} records")


if __name__ == "__main__":
    main()
