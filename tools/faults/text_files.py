"""Chat templates and tokenizers of a downloaded model, and Python files next to them."""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from pathlib import Path
from random import Random

from tools.faults.commands import start, wait
from tools.faults.fixtures import write_lines
from tools.faults.models import VALUES, copy_base, edit, generate, run_cases
from tools.faults.registry import Failure, Trial, fault

# Known escapes from Jinja's sandbox. Several would create the file "created".
TOUCH = "__import__('os').system('touch created')"
ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch created') }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('touch created').read() }}",
    "namespace": "{{ namespace.__init__.__globals__.__builtins__.open('created', 'w') }}",
    "self": "{{ self.__init__.__globals__.__builtins__.open('created', 'w') }}",
    "our functions": f'{{{{ raise_exception.__globals__.__builtins__.eval("{TOUCH}") }}}}',
    "the clock": f'{{{{ strftime_now.__globals__.__builtins__.eval("{TOUCH}") }}}}',
    "attr": "{{ (''|attr('__class__')|attr('__mro__'))[1]|attr('__subclasses__')() }}",
    "format": "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}",
    "format_map": "{{ '{x.__class__.__init__.__globals__}'.format_map({'x': messages}) }}",
    "map": "{{ [messages]|map(attribute='__class__')|list }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__['os'].system('touch created') }}",
    "generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch created') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "mutation": "{{ messages.append(1) }}{{ messages.clear() }}",
}
WRONG = {
    "raises": "{{ raise_exception('no\\nno\\n\\nhydrajax: no') }}",
    "division": "{{ 1 / 0 }}",
    "open tag": "{% for",
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "5 MB": "x" * 5_000_000,
    "5 MB of tags": "{{ 1 }}" * 700_000,
    "lone surrogate": "\ud800",
    "special tokens": "{{ bos_token }}" * 3000,
    "empty": "{{ '' }}",
    "blank": " ",
    "long": "{{ 'x' * 1000000 }}",
    "10 GB": "{{ 'x' * 10**10 }}",
    "wide field": "{{ '%9999999999d' % 1 }}",
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
}
OTHER_TYPES = (3, None, True, [], {}, [{"name": "default"}], [{"name": 3, "template": 4}], {"default": 3}, ["x"], "")


def templated(trial: Trial, template: object, *, file: bool = False) -> tuple:
    """The command that formats a question with the base's own template."""
    folder = copy_base(trial)
    if file:
        (folder / "chat_template.jinja").write_text(str(template), errors="surrogatepass")
    else:
        edit(folder / "tokenizer_config.json", chat_template=template)
    questions = write_lines(trial.folder / "questions.jsonl", [{"turns": ["the tree"]}])
    return (*generate(folder)[:-2], "--prompts", questions)


@fault("chat-templates")
def templates(trial: Trial) -> int:
    commands = {what: partial(templated, trial, text) for what, text in {**ESCAPES, **WRONG}.items()}
    commands |= {f"{what}, file": partial(templated, trial, text, file=True) for what, text in WRONG.items()}
    commands |= {repr(value): partial(templated, trial, value) for value in OTHER_TYPES}
    return run_cases(trial, commands)


@fault("chat-templates-endless")
def endless(trial: Trial) -> int:
    """Templates that never end (docs/reliability.md): SIGINT and SIGTERM end the command."""
    for what, template in ENDLESS.items():
        for number in (signal.SIGINT, signal.SIGTERM):
            process = start(*templated(trial, template))
            time.sleep(30)
            process.send_signal(number)
            code, _, err = wait(process, trial)
            if code != 128 + number or "Traceback" in err:
                raise Failure(f"{what}, signal {number}: exit code {code}: {err[-200:]}")
    return 2 * len(ENDLESS)


# --- tokenizers -------------------------------------------------------------------------------------------------------

FIELDS = {
    "class": {"tokenizer_class": "os.system"},
    "class that is not a tokenizer": {"tokenizer_class": "PreTrainedModel"},
    "class of local code": {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"},
    "class of remote code": {"auto_map": {"AutoTokenizer": ["org/evil--evil.Evil", None]}},
    "other files": {"tokenizer_file": "/etc/passwd", "vocab_file": "/etc/passwd", "merges_file": "/dev/zero"},
    "other name": {"name_or_path": "/dev/zero"},
    "negative length": {"model_max_length": -1},
    "length of text": {"model_max_length": "x"},
    "special token": {"eos_token": {"__type": "AddedToken", "content": "\ud800"}},
    "lists of special tokens": {"additional_special_tokens": [["x"], 3]},
    "50,000 added tokens": {"added_tokens_decoder": {str(n): {"content": f"t{n}"} for n in range(50_000)}},
    "id 2^63": {"added_tokens_decoder": {str(2**63): {"content": "x"}}},
    "slow": {"use_fast": False, "tokenizer_class": "LlamaTokenizer"},
}
PATTERNS = {
    "(a+)+$": "a" * 40 + "b",
    "(": "x",
    "(?<=a{1,100000})b": "aab",
    "(?:(?:(?:a{1,999}){1,999}){1,999})": "a" * 100,
}


def paths_of(tree: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a JSON tree, of a list its first five."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:5]) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*path, key), *paths_of(value, (*path, key)))]


def damage(path: Path, random: Random) -> None:
    """Replace one value of a JSON file."""
    tree = json.loads(path.read_text())
    *parents, last = random.choice(paths_of(tree))
    at, value = tree, random.choice(VALUES)
    for key in parents:
        at = at[key]
    at[last] = "\0"
    path.write_text(json.dumps(tree).replace('"\\u0000"', value))


@fault("tokenizers", seeds=3)
def tokenizers(trial: Trial) -> int:
    """Replaced values, classes and code that must not be loaded, regular expressions that never end."""

    def fields(changes: dict) -> tuple:
        folder = copy_base(trial)
        edit(folder / "tokenizer_config.json", **changes)
        edit(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]})
        for name in ("evil.py", "__init__.py", "tokenization.py", "sitecustomize.py", "jax.py"):
            (folder / name).write_text("open('created', 'w')\nclass Evil: pass\n")
        return generate(folder)

    def pattern(regex: str, text: str) -> tuple:
        folder = copy_base(trial)
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        edit(folder / "tokenizer.json", pre_tokenizer=split)
        return (*generate(folder)[:-1], text)

    def growing() -> tuple:
        folder = copy_base(trial)
        tenfold = {"type": "Replace", "pattern": {"String": "e"}, "content": "eeeeeeeeee"}
        edit(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [tenfold] * 4})
        return generate(folder)

    def damaged(seed: float) -> tuple:
        folder = copy_base(trial)
        damage(folder / ("tokenizer.json" if seed < 0.7 else "tokenizer_config.json"), Random(seed))
        return generate(folder)

    def sentencepiece(content: bytes) -> tuple:
        folder = copy_base(trial)
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(content)
        return generate(folder)

    commands = {what: partial(fields, changes) for what, changes in FIELDS.items()}
    commands |= {f"pattern {regex}": partial(pattern, regex, text) for regex, text in PATTERNS.items()}
    commands["growing text"] = growing
    commands |= {f"damaged {seed}": partial(damaged, seed) for seed in (trial.random.random() for _ in range(20))}
    contents = (b"", trial.random.randbytes(500), b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x02}.")
    commands |= {f"tokenizer.model {content[:6]!r}": partial(sentencepiece, content) for content in contents}
    return run_cases(trial, commands)
