"""Grammars as values, on the command line, and as an argument of `generate` and `stream`."""

import json
import re
import shutil
from functools import partial
from typing import Literal

import jsonschema
import pydantic
import pytest

import hydrajax
from helpers import commands, small_tokenizer
from hydrajax.cli import main
from hydrajax.decoding.decode import make_decode_fn
from hydrajax.decoding.executor import FusedExecutor
from hydrajax.decoding.program import Program
from hydrajax.decoding.request import Request
from hydrajax.decoding.state import Params
from hydrajax.drafters.draft_model import DraftModel
from hydrajax.errors import HydrajaxError
from hydrajax.grammar.grammar import MOST_BYTES, Grammar
from hydrajax.sharding import Placement, make_mesh
from hydrajax.ssd.split_executor import SplitExecutor
from hydrajax.trees import presets

VOCAB, EOS, NEW = 320, 2, 32


class Point(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["tree", "root"]
    depth: int = pydantic.Field(ge=0, le=99)


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["tree", "root"]}, "depth": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "depth"],
    "additionalProperties": False,
}
TEXT = r'\{"kind": "(tree|root)", "depth": ([0-9]|[1-9][0-9])\}'  # of the schema, and of the model


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer.byte_level()


@pytest.fixture(scope="module")
def base(llama_checkpoint, tokenizer, tmp_path_factory):
    """A random base with a tokenizer and EOS."""
    small = llama_checkpoint(vocab_size=VOCAB, max_position_embeddings=128, num_hidden_layers=1)
    folder = shutil.copytree(small, tmp_path_factory.mktemp("base") / "tiny")
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return folder


@pytest.fixture(scope="module")
def m(base):
    found = hydrajax.load(base, "lookup")
    assert found.eos_ids == (EOS,)
    return found


@pytest.fixture(scope="module")
def started(tokenizer):
    """``started(grammar)``: its matcher."""
    return lambda grammar: grammar.start(tokenizer, VOCAB, (EOS,))


def test_constructors(started):
    for same in (SCHEMA, json.dumps(SCHEMA)):
        assert Grammar.json_schema(same) == Grammar.json_schema(SCHEMA)
        assert hash(Grammar.json_schema(same)) == hash(Grammar.json_schema(SCHEMA))
    assert json.loads(Grammar.json_schema(Point).text)["properties"].keys() == {"kind", "depth"}
    assert Grammar.json_schema(True) == Grammar.json_schema({}) == Grammar.json_schema("true")
    assert Grammar.json_object() == Grammar.json_schema({"type": "object"})
    assert json.loads(Grammar.choices(["b", "a", "b"]).text) == ["b", "a"]
    assert (Grammar.regex("a").kind, Grammar.lark('start: "a"').kind) == ("regex", "lark")
    for grammar in (Grammar.json_schema(Point), Grammar.json_object(), Grammar.lark("start: /[ab]+/")):
        assert started(grammar).error is None


def test_whitespace_of_json(tokenizer):
    """By default a value is written in one way, that of `json.dumps`."""
    value = {"a": [1, {"b": None}], "c": "d"}
    fixed = Grammar.json_schema({"const": value})
    assert tokenizer.decode(fixed.start(tokenizer, VOCAB, (EOS,)).forced(99)[:-1]) == json.dumps(value)
    flexible = Grammar.json_schema({"const": value}, whitespace=True).start(tokenizer, VOCAB, (EOS,))
    for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))):
        matcher = flexible.copy()
        matcher.follow(tokenizer.encode(text, add_special_tokens=False))
        assert matcher.error is None


def deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


BAD_SCHEMAS = [
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
    (False, "Unsatisfiable schema"),
    ({"not": {"type": "string"}}, r'Unimplemented keys: \["not"\]'),
    ({"if": {}, "then": {}}, r'Unimplemented keys: \["if", "then"\]'),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
    ({"type": "nothing"}, "Invalid type: nothing"),
    ({"type": "string", "pattern": "a("}, "unclosed group"),
    ({"$ref": "#/$defs/none"}, "'/\\$defs/none' does not exist"),
    ({"$ref": "http://localhost/x"}, "localhost"),
    ({"$ref": "#"}, ""),
    ("{", "json_schema: got text that is not JSON"),
    ("[1]", "json_schema: got list, expected an object or a pydantic model"),
    (int, "json_schema: got type, expected an object or a pydantic model"),
    ({"const": {1}}, "json_schema: got a schema that JSON cannot hold"),
    ({"const": float("nan")}, ""),
    ({"const": "\ud800"}, ""),
    (deep(200), ""),
    (deep(20_000), ""),
    ({"const": "a" * MOST_BYTES}, f"json_schema: got more than {MOST_BYTES} bytes"),
]
BAD_REGEXES = [
    ("a(", "regex: .*unclosed group"),
    ("(?=a)b", "regex: .*look-around"),
    ("", "regex: got '', expected a text"),
    (r"[^\s\S]", ""),
    ("(" * 5000 + "a" + ")" * 5000, ""),
    ("\ud800", ""),
    ("a" * (MOST_BYTES + 1), f"regex: got more than {MOST_BYTES} bytes"),
]
BAD_CHOICES = [(value, "choices: got .*, expected a list of texts") for value in ("ab", [], ["a", ""], ["a", 3])]
BAD_LARK = [
    ("start: start", ""),
    ("start: x", 'lark: .*unknown name: "x"'),
    ('x: "a"', "lark: no start rule found"),
    ("start ; a", "lark: .*error"),
    ("start: " + "(" * 5000 + '"a"' + ")" * 5000, ""),
]


def test_refusals_name_the_kind_and_the_fault_in_one_line(started):
    for make, cases in (
        (Grammar.json_schema, BAD_SCHEMAS),
        (Grammar.regex, BAD_REGEXES),
        (Grammar.choices, BAD_CHOICES),
        (Grammar.lark, BAD_LARK),
    ):
        for value, pattern in cases:
            with pytest.raises(HydrajaxError) as error:
                started(make(value))
            message = str(error.value)
            assert message.startswith(f"{make.__name__}: ")
            assert re.search(pattern, message), message
            assert "\n" not in message
            assert len(message) < 400


def chain_of_references(count: int) -> dict:
    definitions = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(count)}
    return {"$defs": definitions | {f"d{count}": {"const": "x"}}, "$ref": "#/$defs/d0"}


def test_a_long_chain_of_definitions_is_compiled(started, tokenizer):
    """It must not overflow the stack, which would end the process."""
    for grammar in [
        Grammar.json_schema(chain_of_references(3000)),
        Grammar.lark("start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(3000)) + '\na3000: "x"'),
    ]:
        assert tokenizer.decode(started(grammar).forced(9)[:-1]).strip('"') == "x"


def generate(m, prompts, grammar, **keywords):
    return m.generate(prompts, grammar=grammar, tree="chain-3", **{"max_new_tokens": NEW} | keywords)


def test_one_prompt(m):
    """A schema, a pydantic model and an equivalent expression allow the same texts, so greedy output is the same."""
    grammars = (SCHEMA, Point, Grammar.json_schema(SCHEMA), Grammar.regex(TEXT))
    results = [generate(m, "the tree", grammar) for grammar in grammars]
    assert len({result.text for result in results}) == 1
    for result in results:
        assert re.fullmatch(TEXT, result.text)
        jsonschema.validate(json.loads(result.text), SCHEMA)
        Point.model_validate_json(result.text)
        assert result.finish_reason == "eos"
        assert result.output_ids[-1] == EOS


def test_a_list_of_prompts_with_and_without_grammars(m):
    prompts = ["the tree", "a draft of", "日本"]
    found = generate(m, prompts, [SCHEMA, None, Grammar.choices(["naïve", "café"])], batch_size=3)
    assert re.fullmatch(TEXT, found[0].text)
    assert not re.fullmatch(TEXT, found[1].text)  # tests/decoding/test_executors.py compares its tokens
    assert found[2].text in ("naïve", "café")
    for row, alone in ((0, SCHEMA), (2, Grammar.choices(["naïve", "café"]))):
        assert generate(m, prompts[row], alone).output_ids == found[row].output_ids
    with pytest.raises(HydrajaxError, match="grammar: got 2 values for 3 prompts"):
        generate(m, prompts, [SCHEMA, None])


def test_streamed_text_is_the_generated_text(m):
    stream = m.stream("the tree", grammar=SCHEMA, tree="chain-3", max_new_tokens=NEW)
    pieces = list(stream)
    whole = generate(m, "the tree", SCHEMA)
    assert "".join(pieces) == whole.text == stream.result.text
    assert re.fullmatch(TEXT, whole.text)
    assert stream.result.output_ids == whole.output_ids
    assert len(pieces) > 1


def test_a_grammar_begins_after_a_mark(m, tokenizer):
    """The text up to the mark is the free one."""
    grammar = Grammar.choices(["naïve", "café"])
    free = generate(m, "the tree", grammar.after(VOCAB - 1)).output_ids
    assert VOCAB - 1 not in free
    for mark in free[2], free[6]:
        place = free.index(mark) + 1
        found = generate(m, "the tree", grammar.after(mark))
        assert found.output_ids[:place] == free[:place]
        assert tokenizer.decode(found.output_ids[place:-1]) in ("naïve", "café")
        assert found.finish_reason == "eos"


SENTENCE = {"const": {"a": "the draft of the tree of a root"}}


def test_a_stop_string_ends_a_text_within_a_json_string(m):
    result = generate(m, "the tree", SENTENCE, stop=["of the"])
    assert (result.text, result.finish_reason) == ('{"a": "the draft ', "stop")
    result = generate(m, "the tree", SENTENCE, stop=["absent"])
    assert (json.loads(result.text), result.finish_reason) == (SENTENCE["const"], "eos")


# Small limits are other programs.
def test_the_limit_cuts_an_object(m):
    whole = generate(m, "the tree", SENTENCE)
    limit = len(whole.output_ids) - 1
    result = generate(m, "the tree", SENTENCE, max_new_tokens=limit)
    assert result.output_ids == whole.output_ids[:limit]
    assert result.finish_reason == "length"


def test_bad_grammars_are_refused_before_decoding(m):
    for grammar in (3, "a*", [3]):
        with pytest.raises(HydrajaxError, match=r"grammar: got .*, expected a Grammar, a JSON schema"):
            generate(m, ["the tree"], grammar)
    with pytest.raises(HydrajaxError, match="Unsatisfiable schema"):
        generate(m, "the tree", {"enum": []})
    with pytest.raises(HydrajaxError, match="response_format: unknown argument; did you mean grammar"):
        m.generate("the tree", response_format=SCHEMA)


def test_decode_functions_and_other_executors_refuse_a_grammar(m):
    request = Request(grammar=Grammar.regex("a"))
    program = Program(eos_ids=(EOS,)).serving(request)
    placement = Placement()
    object.__setattr__(placement, "draft", make_mesh())  # on the only device, which a `Placement` refuses
    refused = pytest.raises(HydrajaxError, match=r"^grammar: got one, expected none here: use m\.generate")
    with refused:
        make_decode_fn(m.model, program)
    with refused:
        FusedExecutor(m.model, m.params, Program(), request)
    with refused:
        program = program.replace(drafter=DraftModel(m.model, VOCAB), tree=presets.chain(2))
        SplitExecutor(m.model, Params(m.params.base, m.params.base), program, placement=placement)


@pytest.fixture
def program(base, m, capsys, monkeypatch):
    """``program(*argv)`` runs `hydrajax generate` in this process on the base, which is loaded and compiled already."""
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    monkeypatch.setattr("hydrajax.cli.options.load_from", lambda args, on_status: m)

    common = ("--base", base, "--draft", "lookup", "--tree", "chain-3", "--prompt", "the tree")
    return partial(commands.run, main, capsys, "generate", *common, "--max-new-tokens", NEW)


def test_flags_of_grammars(program, m, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "naïve " WORD\nWORD: /[a-c]{3}/', encoding="utf-8")
    expected = generate(m, "the tree", SCHEMA).text
    for argv in (("--json-schema", schema), ("--regex", TEXT), ("--json-schema", schema, "--stream")):
        assert program(*argv).out == f"{expected}\n"
    assert program("--choices", "the draft", "café").out in ("the draft\n", "café\n")
    assert re.fullmatch("naïve [a-c]{3}\n", program("--lark", lark).out)


def test_bad_grammars_are_refused_before_anything_is_measured_or_decoded(m, monkeypatch):
    bad = Grammar.json_schema({"not": {}})
    good = Request(max_new_tokens=40, grammar=Grammar.choices(["a"]))
    executor = m.executor(m.program(good, tree="chain-3"))
    monkeypatch.setattr(executor, "run", lambda *_: pytest.fail("decoded"))
    with pytest.raises(HydrajaxError, match='json_schema: Unimplemented keys: \\["not"\\]'):
        hydrajax.generate(executor, ["the tree", "the root"], requests=[good, good.replace(grammar=bad)])
    monkeypatch.setattr("hydrajax.bench.contests.fastest.measure", lambda *_, **settings: pytest.fail("measured"))
    for tree in (None, "auto"):
        with pytest.raises(HydrajaxError, match="json_schema: Unimplemented keys"):
            m.generate("the tree", grammar=bad, tree=tree)
