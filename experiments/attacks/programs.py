"""Attacks by the programs that a download may bring: chat templates, tokenizers, Python files beside a model."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from random import Random

from attacks.commands import finish, start
from attacks.hostile import ODD, copy, edited, generated, tried
from attacks.registry import Fell, Place, attack

# The ways out of Jinja's sandbox, of which none may be open; each would make the file "created".
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
    "a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__['os'].system('touch created') }}",
    "a generator": "{{ (messages|map('upper')).gi_frame.f_globals }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch created') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "changes": "{{ messages.append(1) }}{{ messages.clear() }}",
}
WRONG = {
    "raises": "{{ raise_exception('no\\nno\\n\\nhydrajax: no') }}",
    "divides": "{{ 1 / 0 }}",
    "half a tag": "{% for",
    "a range": "{% for i in range(10**9) %}x{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "5 MB": "x" * 5_000_000,
    "5 MB of tags": "{{ 1 }}" * 700_000,
    "half of a pair": "\ud800",
    "special tokens": "{{ bos_token }}" * 3000,
    "nothing": "{{ '' }}",
    "blank": " ",
    "long": "{{ 'x' * 1000000 }}",
    "10 GB": "{{ 'x' * 10**10 }}",
    "a wide field": "{{ '%9999999999d' % 1 }}",
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
}
OTHERS = (3, None, True, [], {}, [{"name": "default"}], [{"name": 3, "template": 4}], {"default": 3}, ["x"], "")


def asked(place: Place, template: object, *, file: bool = False) -> tuple:
    """The command that writes a question out in a base's own template."""
    folder = copy(place)
    if file:
        (folder / "chat_template.jinja").write_text(str(template), errors="surrogatepass")
    else:
        edited(folder / "tokenizer_config.json", chat_template=template)
    questions = place.folder / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["the tree"]}) + "\n")
    return (*generated(folder)[:-2], "--prompts", questions)


@attack("chat templates", count=1)
def templates(place: Place) -> int:
    found = {**ESCAPES, **WRONG}
    commands = {what: lambda x=text: asked(place, x) for what, text in found.items()}
    commands |= {f"{what}, a file": lambda x=text: asked(place, x, file=True) for what, text in WRONG.items()}
    commands |= {repr(other): lambda x=other: asked(place, x) for other in OTHERS}
    return tried(place, commands)


@attack("chat templates without end", count=1)
def endless(place: Place) -> int:
    """They take for ever, as docs/reliability.md says; Ctrl-C and SIGTERM end them all the same."""
    for what, template in ENDLESS.items():
        for number in (signal.SIGINT, signal.SIGTERM):
            process = start(*asked(place, template))
            time.sleep(30)
            process.send_signal(number)
            code, _, err = finish(process, place)
            if code != 128 + number or "Traceback" in err:
                raise Fell(f"{what}, signal {number}: exit code {code}: {err[-200:]}")
    return 2 * len(ENDLESS)


def places(tree: object, path: tuple = ()) -> list[tuple]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:5]) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def spoilt(path: Path, random: Random) -> str:
    """Another value somewhere in a file of JSON; says where."""
    tree = json.loads(path.read_text())
    *parents, last = where = random.choice(places(tree))
    at, value = tree, random.choice(ODD)
    for key in parents:
        at = at[key]
    at[last] = "\0"
    path.write_text(json.dumps(tree).replace('"\\u0000"', value))
    return f"{path.name} {where}: {value[:20]}"


FIELDS = {
    "another class": {"tokenizer_class": "os.system"},
    "a class of transformers that is none": {"tokenizer_class": "PreTrainedModel"},
    "a class of code": {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"},
    "a class of code elsewhere": {"auto_map": {"AutoTokenizer": ["org/evil--evil.Evil", None]}},
    "files elsewhere": {"tokenizer_file": "/etc/passwd", "vocab_file": "/etc/passwd", "merges_file": "/dev/zero"},
    "another name": {"name_or_path": "/dev/zero"},
    "a length": {"model_max_length": -1},
    "no length": {"model_max_length": "x"},
    "special tokens": {"eos_token": {"__type": "AddedToken", "content": "\ud800"}},
    "special tokens of lists": {"additional_special_tokens": [["x"], 3]},
    "many": {"added_tokens_decoder": {str(n): {"content": f"t{n}"} for n in range(50_000)}},
    "ids of 2^63": {"added_tokens_decoder": {str(2**63): {"content": "x"}}},
    "slow": {"use_fast": False, "tokenizer_class": "LlamaTokenizer"},
}
PATTERNS = {
    "(a+)+$": "a" * 40 + "b",
    "(": "x",
    "(?<=a{1,100000})b": "aab",
    "(?:(?:(?:a{1,999}){1,999}){1,999})": "a" * 100,
}


@attack("tokenizers", count=3)
def tokenizers(place: Place) -> int:
    """Files with a value of another kind, classes and code that must not be used, patterns without end."""

    def fields(changes: dict) -> tuple:
        folder = copy(place)
        edited(folder / "tokenizer_config.json", **changes)
        edited(
            folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        )
        for name in ("evil.py", "__init__.py", "tokenization.py", "sitecustomize.py", "jax.py"):
            (folder / name).write_text("open('created', 'w')\nclass Evil: pass\n")
        return generated(folder)

    def pattern(regex: str, text: str) -> tuple:
        folder = copy(place)
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        edited(folder / "tokenizer.json", pre_tokenizer=split)
        return (*generated(folder)[:-1], text)

    def growing() -> tuple:
        folder = copy(place)
        twice = {"type": "Replace", "pattern": {"String": "e"}, "content": "eeeeeeeeee"}
        edited(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [twice] * 4})
        return generated(folder)

    def damaged(seed: float) -> tuple:
        folder = copy(place)
        spoilt(folder / ("tokenizer.json" if seed < 0.7 else "tokenizer_config.json"), Random(seed))
        return generated(folder)

    def model(content: bytes) -> tuple:
        folder = copy(place)
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(content)
        return generated(folder)

    commands = {what: lambda x=changes: fields(x) for what, changes in FIELDS.items()}
    commands |= {f"pattern {regex}": lambda x=(regex, text): pattern(*x) for regex, text in PATTERNS.items()}
    commands["a text that grows"] = growing
    commands |= {f"damaged {seed}": lambda x=seed: damaged(x) for seed in (place.random.random() for _ in range(20))}
    contents = (b"", place.random.randbytes(500), b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x80\x02}.")
    commands |= {f"tokenizer.model {content[:6]!r}": lambda x=content: model(x) for content in contents}
    return tried(place, commands)
