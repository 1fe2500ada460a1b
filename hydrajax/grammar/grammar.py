"""Grammars as values: a JSON schema, a regular expression, choices or a Lark grammar, compiled by llguidance."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydrajax.errors import HydrajaxError, one_line
from hydrajax.grammar.after_reasoning import AfterMark
from hydrajax.grammar.matcher import LIMITS, Matcher
from hydrajax.grammar.schema_faults import JsonCheck, mishandled, names_and_patterns
from hydrajax.grammar.trial import TOO_MUCH, fault_of
from hydrajax.grammar.vocabulary import vocabulary_of
from hydrajax.host_memory import return_freed_memory
from hydrajax.optional_deps import needs
from hydrajax.text.tokenizer import decode_text

# One way to write each value, that of Python's json.dumps: no punctuation is forced where any whitespace may stand.
FIXED_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_BYTES = 1 << 17  # of a grammar's text


@dataclass(frozen=True)
class Grammar:
    """The texts that a model may generate, for ``grammar=`` of `hydrajax.LanguageModel.generate`.

    Use the class methods `json_schema`, `json_object`, `regex`, `choices`, `lark` and `gbnf`.

    Attributes:
        kind: ``json_schema``, ``regex``, ``choices``, ``lark`` or ``gbnf``; names the grammar in messages.
        text: The schema, the expression, the choices as a JSON list, or the grammar.
        whitespace: JSON may contain any whitespace between its tokens. By default there is one space after ``,`` and
            ``:``, as Python's ``json.dumps`` writes, so that more tokens are forced.
        is_valid: judges a complete text; JSON is always checked against its schema.
        special: the text that ``is_valid`` judges has special tokens.
    """

    kind: str
    text: str
    whitespace: bool = False
    is_valid: Callable[[str], bool] | None = field(default=None, compare=False)
    special: bool = field(default=False, compare=False)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type, *, whitespace: bool = False) -> Grammar:
        """Return the grammar of JSON values that are valid under a schema.

        Args:
            schema: a JSON schema as a mapping or as text, or a pydantic model.
            whitespace: see `Grammar`.

        Raises:
            HydrajaxError: for anything else. `start` refuses schemas that llguidance does not support.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise HydrajaxError(f"json_schema: got text that is not JSON ({one_line(error)})") from None
        if isinstance(schema, bool):  # the schemas of all values and of none
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise HydrajaxError(f"json_schema: got {type(schema).__name__}, expected an object or a pydantic model")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False), whitespace)
        except (TypeError, ValueError, RecursionError) as error:
            raise HydrajaxError(f"json_schema: got a schema that JSON cannot hold ({one_line(error)})") from None

    @classmethod
    def json_object(cls, *, whitespace: bool = False) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match a regular expression from start to end (Rust's regex syntax)."""
        return cls("regex", _text("regex", pattern))

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of a few texts."""
        if isinstance(choices, str) or not choices or not all(isinstance(one, str) and one for one in choices):
            raise HydrajaxError(f"choices: got {one_line(repr(choices), 60)}, expected a list of texts")
        return cls("choices", json.dumps(list(dict.fromkeys(choices))))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a context-free grammar in llguidance's dialect of Lark, whose first rule is ``start``."""
        return cls("lark", _text("lark", grammar))

    @classmethod
    def gbnf(cls, grammar: str) -> Grammar:
        """Return a context-free grammar in GBNF, the EBNF of llama.cpp and xgrammar, whose first rule is ``root``."""
        return cls("gbnf", _text("gbnf", grammar))

    @classmethod
    def of_text(cls, grammar: str) -> Grammar:
        """Return the grammar of a text in Lark, or in GBNF if it defines rules by ``::=``."""
        return (cls.gbnf if "::=" in grammar else cls.lark)(grammar)

    def after(self, mark: str | int) -> AfterMark:
        """Return the texts that are free up to a mark, such as ``</think>``, and follow this grammar after it.

        Args:
            mark: the name of one token of the base's vocabulary, or its id.
        """
        return AfterMark(self, mark)

    @functools.cached_property
    def source(self) -> str:
        """The grammar in llguidance's own form.

        Raises:
            HydrajaxError: if llguidance is missing, and for a grammar that is too long, not text, refused by llguidance
                or mishandled by it, or that takes too long to compile.
        """
        try:
            import jsonschema  # noqa: F401
            import llguidance
        except ImportError as error:
            missing = "jsonschema" if error.name == "jsonschema" else "llguidance"
            raise HydrajaxError(f"{self.kind}: {needs(missing)}") from None
        if len(self.text.encode(errors="surrogatepass")) > MOST_BYTES:
            raise HydrajaxError(f"{self.kind}: got more than {MOST_BYTES} bytes, expected a shorter grammar")
        try:
            if self.kind == "json_schema":
                options: Any = {} if self.whitespace else FIXED_WHITESPACE
                found = llguidance.LLMatcher.grammar_from_json_schema(self.text, overrides=options)
            else:
                found = llguidance.grammar_from("choice" if self.kind == "choices" else self.kind, self.text)  # type: ignore[arg-type]
            fault = _fault(found) or (self._schema_fault() if self.kind == "json_schema" else "")
        except (ValueError, OSError) as error:  # nested too deep, half of a surrogate pair, no process
            fault = str(error)
        if fault:
            raise HydrajaxError(f"{self.kind}: {one_line(fault)}")
        return found

    def _schema_fault(self) -> str:
        schema = json.loads(self.text)
        try:
            for names, patterns in names_and_patterns(schema):
                both = {"enum": names, "anyOf": [{"pattern": pattern} for pattern in patterns]}
                if not _fault(json.dumps({"grammars": [{"json_schema": both}]})).startswith("Unsatisfiable"):
                    return "patternProperties: a pattern matches a name in properties, expected none that does"
            return mishandled(schema)
        except (AttributeError, TypeError) as error:  # in a definition without use
            return f"got a keyword of the wrong type ({error})"

    def start(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Matcher:
        """Return the matcher of an empty text, see `hydrajax.decoding.constraints.GrammarLike`.

        Args:
            vocab_size: the base's, which may be larger than the tokenizer's.

        Raises:
            HydrajaxError: for a grammar that llguidance refuses or no text satisfies, and for a base without a fast
                tokenizer or without EOS.
        """
        vocabulary, source = vocabulary_of(tokenizer, vocab_size, tuple(eos_ids)), self.source
        check = JsonCheck(self.text) if self.kind == "json_schema" else self.is_valid
        found = Matcher(vocabulary, source, check and (lambda ids: check(decode_text(tokenizer, ids, self.special))))
        return_freed_memory()  # of earlier grammars: tens of megabytes each
        if found.error:
            raise HydrajaxError(f"{self.kind}: {found.error}")
        return found


def of_schema(value: Any) -> Grammar:
    """Return the grammar of a JSON schema or of a pydantic model; raise `HydrajaxError` for anything else."""
    if isinstance(value, Mapping) or hasattr(value, "model_json_schema"):
        return Grammar.json_schema(value)
    got = one_line(repr(value), 40)
    raise HydrajaxError(f"grammar: got {got}, expected a Grammar, a JSON schema (a dict) or a pydantic model")


def _fault(source: str) -> str:
    """Return why llguidance refuses a grammar, except for what depends on the vocabulary, which the trial lacks."""
    limits = json.dumps(LIMITS | {"verbose_errors": False})
    found = fault_of(re.sub(r"<\[[\d,-]+\]>", "<[0]>", source), limits)
    if "unknown special token" in found:  # only its limits count then, as other text may look like such a token
        found = fault_of(re.sub(r'<[^<>\s"\\]+>', "<[0]>", source), limits)
        return found if found.startswith(TOO_MUCH) else ""
    return "" if found.startswith("NoExtension") else found.replace("<non-verbose/>", "")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise HydrajaxError(f"{name}: got {one_line(repr(value), 40)}, expected a text")
    return value
