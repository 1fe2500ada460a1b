"""Structured output: the grammar of a request's answers, from its fields and tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hydrajax.errors import HydrajaxError
from hydrajax.grammar.after_reasoning import AfterMark
from hydrajax.grammar.grammar import Grammar
from hydrajax.grammar.matcher import can_begin
from hydrajax.grammar.schema_faults import JsonCheck
from hydrajax.serve.answer_formats import Wanted
from hydrajax.serve.harmony import Harmony
from hydrajax.serve.messages import NamedTool, Tool
from hydrajax.serve.protocol import ChatBody, RequestBody
from hydrajax.serve.reasoning import Thinking
from hydrajax.serve.structural_tags import tags_grammar
from hydrajax.serve.tool_calls import CallFormat, CallReader, CallsOrAnswer, Schema


@dataclass(frozen=True)
class Structure:
    """The form of a request's answers.

    Attributes:
        grammar: of the answers, None for free text.
        field: the request's field that the grammar comes from.
        calls: reader of the reasoning and the tool calls in the answers, None if there are none.
    """

    grammar: Grammar | AfterMark | None = None
    field: str = ""
    calls: CallReader | None = None

    def named(self, error: HydrajaxError) -> HydrajaxError:
        """Return an error of the grammar with the request's field."""
        return error if self.grammar is None else _named(error, self.field)

    def after(self, thinking: Thinking | None) -> "Structure":
        """Return the form of answers with a reasoning before it, None for none."""
        if thinking is None:
            return self
        grammar = None if self.grammar is None else thinking.grammar(self.grammar)
        return replace(self, grammar=grammar, calls=replace(thinking, calls=self.calls))


FREE = Structure()


def structure_of(
    body: RequestBody,
    call_format: Callable[[bool], CallFormat],
    harmony: Harmony | None = None,
    added: Mapping[str, int] = {},
) -> Structure:
    """Return the form of the answers to a request.

    Args:
        body: the request.
        call_format: returns the format of calls, given whether answers must be calls, or raises `HydrajaxError`; called
            only for requests with tools.
        harmony: the format of all answers, None for free text.
        added: ids of the base's added tokens that no text contains, for structural tags.

    Raises:
        HydrajaxError: for a grammar or a schema that llguidance refuses, and for fields that contradict each other.
    """
    found = (
        _of_tools(body, call_format(body.tool_choice not in (None, "auto")))
        if body.callable_tools()
        else _of_format(body, harmony, added)
    )
    if found.grammar is not None:
        for name in ("ignore_eos", "min_tokens"):
            if value := getattr(body, name):
                got = str(value).lower()
                raise HydrajaxError(f"{name}: got {got} with {found.field}, whose answers end when they are complete")
    return found


def _of_format(body: RequestBody, harmony: Harmony | None, added: Mapping[str, int]) -> Structure:
    if (wanted := body.wanted()) is None:
        return Structure(calls=harmony)
    kind, value, field = wanted
    if (schema := _schema(wanted)) is not None:
        grammar = _of_schema(schema, field)
        return Structure(grammar if harmony is None else harmony.grammar({}, answer=schema), field, harmony)
    if harmony is not None:
        raise HydrajaxError(f"{field}: got one for a base that answers in channels, expected JSON")
    try:
        if kind == "structural_tag":
            grammar = tags_grammar(value, field, added, _of_schema)
        else:
            grammar = {"regex": Grammar.regex, "choice": Grammar.choices, "grammar": Grammar.of_text}[kind](value)
        _ = grammar.source
    except HydrajaxError as error:
        raise _named(error, field) from None
    except RecursionError:
        raise HydrajaxError(f"{field}: is nested too deeply") from None
    return Structure(grammar, field)


def _schema(wanted: Wanted | None) -> Schema | None:
    """Return the JSON schema that answers follow, None for free text and other grammars."""
    if wanted is None or wanted.kind not in ("json", "json_object"):
        return None
    return {"type": "object"} if wanted.kind == "json_object" else wanted.value


def _of_tools(body: ChatBody, calls: CallFormat) -> Structure:
    choice = body.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    schemas = {tool.function.name: _arguments(number, tool) for number, tool in enumerate(body.callable_tools())}
    if named is not None:
        schemas = {named: schemas[named]}
    several = named is None and body.parallel_tool_calls is not False
    wanted = body.wanted() if choice in (None, "auto") else None
    answer, field = _schema(wanted), "" if wanted is None else wanted.field
    if wanted is not None and answer is None:
        raise HydrajaxError(f"{field}: got one with tools, expected JSON, or tool_choice none or required")
    reader = calls.reader(schemas)
    if answer is None:
        grammar = calls.grammar(schemas, text=choice in (None, "auto"), several=several)
        return Structure(_checked(grammar, reader, schemas), "tools", reader)
    source, heads = _of_schema(answer, field).source, calls.heads(schemas)
    for name, head in heads.items():
        if can_begin(source, head):
            raise HydrajaxError(
                f"{field}: allows JSON that begins as a call of {name} does; set additionalProperties to false, or "
                "tool_choice to none or required"
            )
    reader = CallsOrAnswer(reader, heads.values()) if heads else reader
    grammar = calls.grammar(schemas, several=several, answer=answer)
    return Structure(_checked(grammar, reader, schemas, answer), "tools", reader)


def _checked(grammar: Grammar, reader: CallReader, schemas: dict[str, Schema], answer: Schema | None = None) -> Grammar:
    """Return the grammar with a check of complete answers: of the arguments of calls, or of the answer without any.

    Harmony's has none: commentaries are content too.
    """
    if isinstance(reader, Harmony):
        return grammar

    def is_valid(text: str) -> bool:
        content, calls, _ = reader.read(text, True)
        checked = [(schemas[call.name], call.arguments) for call in calls]
        if not calls and answer is not None:
            checked = [(answer, content)]
        return all(JsonCheck(json.dumps(schema))(value) for schema, value in checked)

    return replace(grammar, is_valid=is_valid, special=bool(reader.special))


def _arguments(number: int, tool: Tool) -> Schema:
    """Return the JSON schema of a tool's arguments, which are an object."""
    field, schema = f"tools.{number}.function.parameters", tool.function.parameters
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise HydrajaxError(f"{field}.type: got {schema['type']!r}, expected 'object'")
    schema = {"type": "object"} | schema
    _of_schema(schema, field)
    return schema


def _of_schema(schema: Schema, field: str) -> Grammar:
    """Return the grammar of a schema in the request's ``field``; raise `HydrajaxError` if it cannot be used."""
    try:
        found = Grammar.json_schema(schema)
        _ = found.source
    except HydrajaxError as error:
        raise _named(error, field) from None
    return found


def _named(error: HydrajaxError, field: str) -> HydrajaxError:
    """Return an error with the request's field if it begins with a kind of grammar."""
    if error.field not in ("json_schema", "lark", "grammar", "gbnf", "regex", "choices"):
        return error
    return HydrajaxError(f"{field}: {str(error).removeprefix(f'{error.field}: ')}")
