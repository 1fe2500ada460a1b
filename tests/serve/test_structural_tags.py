"""Structural tags: which texts their grammars accept, and what is refused."""

import json

import pytest

from helpers import json_letters
from helpers.json_letters import END_TAG, TAG, accepts
from hydrajax.errors import HydrajaxError
from hydrajax.serve.structural_tags import tags_grammar
from hydrajax.serve.structured import _of_schema

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
A = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": X}, "end": ["</a>", "</b>"]}
OLD = {
    "structures": [{"begin": f"<do={name}>", "schema": X, "end": "</do>"} for name in "ab"],
    "triggers": ["<do="],
}


def tags(**fields):
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [A]} | fields}


def sequence(*elements):
    return {"format": {"type": "sequence", "elements": list(elements)}}


ONE, OTHER, WRONG = '<a>{"x": 1}</b>', '<a>{"x": 22}</a>', '<a>{"y": 1}</a>'
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
PARTS = sequence(
    THOUGHT,
    {"type": "regex", "pattern": "[a-z]/\\d+"},
    {"type": "or", "elements": [{"type": "const_string", "value": 'é"\n'}, {"type": "optional", "content": A}]},
    {"type": "any_text"},
)
TEXTS = [
    (OLD, ["", "<", "b", 'b <do=a>{"x": 1}</do> b <do=b>{"x": 2}</do>', "<<do"], ["<do=c>", '<do=a>{"x": 1}', "b<do="]),
    (tags(), ["", "b", ONE, f"b {ONE}b{OTHER}"], [WRONG, "b<a"]),
    (tags(at_least_one=True), [ONE, f"{ONE}b{OTHER}"], ["", f"b{ONE}"]),
    (tags(stop_after_first=True), ["", "b", ONE, f"b {ONE}"], [f"{ONE}b", WRONG]),
    (tags(at_least_one=True, stop_after_first=True), [ONE], ["", f"b{ONE}", f"{ONE}b"]),
    ({"format": {"type": "tags_with_separator", "tags": [A], "separator": ", "}}, ["", ONE, f"{ONE}, {OTHER}"], ["b"]),
    (PARTS, ['<t>b</</t>a/12é"\n', "<t></t>a/1", f"<t></t>a/1{ONE}b"], ["<t>a/1", "<t></t>a1"]),
    ({"format": {"type": "star", "content": THOUGHT}}, ["", "<t>b</t><t></t>"], ["b"]),
]  # fmt: skip


def test_the_texts_of_structural_tags():
    tokenizer = json_letters.shipped_tokenizer(TAG, END_TAG)
    added = {TAG: tokenizer.convert_tokens_to_ids(TAG), END_TAG: tokenizer.convert_tokens_to_ids(END_TAG)}
    # With added tokens for tags, the same texts are written in these tokens.
    renamed = [("<do=", TAG), ("</do>", END_TAG)]
    cases = [(given, good, bad, lambda text: text) for given, good, bad in TEXTS]
    cases.append((OLD, TEXTS[0][1][2:4], TEXTS[0][2], lambda text: text.replace(*renamed[0]).replace(*renamed[1])))
    for given, good, bad, named in cases:
        grammar = tags_grammar(json.loads(named(json.dumps(given))), "tag", added, _of_schema)
        found = [[accepts(tokenizer, grammar, named(text)) for text in texts] for texts in (good, bad)]
        assert found == [[True] * len(good), [False] * len(bad)], (given, found)


REFUSED = [
    ({}, "tag.structures: is missing"),
    (OLD | {"triggers": ["<b"]}, 'tag.tags.0.begin: got "<do=a>", expected it to begin with one of triggers'),
    (OLD | {"triggers": []}, "tag.triggers: got [], expected a list of at least 1 item"),
    (OLD | {"triggers": [1]}, "tag.triggers: got [1], expected texts"),
    (OLD | {"structures": [{"begin": "<do=", "schema": X}]}, "tag.structures.0.end: is missing"),
    (OLD | {"format": {}}, "tag.structures: this field is not supported"),
    ({"format": {"type": "token", "token": 1}}, "tag.format.type: got 'token', expected const_string, json_schema, "),
    ({"format": {"type": "tag"} | {"begin": 1}}, "tag.format.begin: got 1, expected a text"),
    ({"format": THOUGHT | {"end": []}}, "tag.format.end: got [], expected a text or a list"),
    (tags(excludes=["b"]), "tag.format.excludes: this field is not supported"),
    (tags(at_least_one=1), "tag.format.at_least_one: this field is not supported"),
    (sequence({"type": "any_text"}, A), "tag.format.elements.0.type: got any_text before other formats"),
    (
        sequence({"type": "json_schema", "json_schema": X, "style": "qwen_xml"}),
        "tag.format.elements.0.style: this",
    ),
    (sequence({"type": "json_schema", "json_schema": {"not": {}}}), "tag.format.elements.0.json_schema: Unimplemented"),
    ({"format": {"type": []}}, "tag.format.type: got '[]', expected const_string"),
    (sequence(3), "tag.format.elements.0.type: got 'None', expected const_string"),
]


def test_what_is_refused():
    for given, message in REFUSED:
        with pytest.raises(HydrajaxError) as error:
            tags_grammar(given, "tag", {}, _of_schema)
        assert str(error.value).startswith(message)
