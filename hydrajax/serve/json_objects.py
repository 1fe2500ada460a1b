"""JSON objects of requests, and errors that name their fields."""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pydantic
from pydantic import BaseModel, ConfigDict

from hydrajax.errors import HydrajaxError
from hydrajax.text.jsonl import shown

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS, MOST_ALTERNATIVES = 128, 16, 128, 20
NUMBERS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
KINDS = {  # of pydantic's errors
    "int_type": "an integer", "int_parsing_size": "a smaller integer", "float_type": "a finite number",
    "bool_type": "true or false", "bool_parsing": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object",
    "string_pattern_mismatch": "1 to 64 letters, digits, _ and -",
}  # fmt: skip
UNIONS = {
    "prompt": f"a text, a list of token ids, or a list of up to {MOST_PROMPTS} of either",
    "stop": f"a text or a list of up to {MOST_STOPS} texts",
    "tool_choice": 'none, auto, required or {"type": "function", "function": {"name": ...}}',
}
REFUSED = {
    "functions": "none; use tools, which replace it",
    "function_call": "none; use tool_choice, which replaces it",
    "suffix": "none, as this server only continues prompts",
}
IGNORED = object()  # stands for any value in the tables of what changes nothing


class JsonObject(BaseModel):
    """An object of a request, without unknown fields. Null and the values of ``NEUTRAL`` count as absent."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    NEUTRAL: ClassVar[dict[str, Any]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if not cls._is_neutral(name, value)}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema, in which null and neutral values are allowed too."""
        found = handler(core_schema)
        schema = handler.resolve_ref_schema(found)
        fields, null = schema.setdefault("properties", {}), {"type": "null"}
        for name, field in fields.items():
            if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
                fields[name] = {"anyOf": [field, null]}
        for name, value in cls.NEUTRAL.items():
            neutral = {} if value is IGNORED else {"anyOf": [{"const": value}, null]}
            fields[name] = {"anyOf": [fields[name], neutral]} if name in fields else neutral
        return found | ({"additionalProperties": null} if schema is found else {})

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        neutral = cls.NEUTRAL.get(name)
        same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)  # False == 0
        return value is None or neutral is IGNORED or same


@contextmanager
def naming_fields() -> Iterator[None]:
    """Raise pydantic's errors as a `HydrajaxError` that names the first wrong field."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise HydrajaxError(_message(error.errors(include_url=False)[0])) from None


def distinct(field: str, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name is repeated."""
    if repeated := [name for index, name in enumerate(names) if name in names[:index]]:
        raise ValueError(f"{field}: got {repeated[0]} twice, expected different names")


def _message(error: dict[str, Any]) -> str:
    message, found = error["msg"].removeprefix("Value error, "), quoted(error["input"])
    if error["type"] == "json_invalid":
        return f"the body is not JSON ({message.removeprefix('Invalid JSON: ')})"
    # In a union, pydantic appends the type that it tried.
    field = ".".join(str(part) for part in error["loc"] if _is_field(part)) or "the body"
    if error["type"] == "value_error":  # of a validator that names the field itself, or of the field's own
        return message if not error["loc"] else f"{field}{': ' if message.startswith('got ') else '.'}{message}"
    if error["type"] == "missing":
        return f"{field}: is missing"
    if error["type"] == "extra_forbidden":
        expected = REFUSED.get(field)
        return f"{field}: got {found}, expected {expected}" if expected else f"{field}: this field is not supported"
    if field.split(".")[0] in UNIONS:  # pydantic names the type that it tried first
        return f"{field}: got {found}, expected {UNIONS[field.split('.')[0]]}"
    return f"{field}: got {found}, expected {_expected(error['type'], message, error.get('ctx', {}))}"


def quoted(value: Any) -> str:
    return reprlib.repr(value) if isinstance(value, str) else shown(value)


def _expected(kind: str, message: str, numbers: dict[str, Any]) -> str:
    """Return the allowed values of a field in our words; ``numbers`` are the limits that pydantic names."""
    if kind in ("too_long", "too_short", "string_too_long", "string_too_short"):
        number = numbers.get("max_length", numbers.get("min_length"))
        unit = "character" if kind.startswith("string") else "item"
        return f"at {'most' if kind.endswith('long') else 'least'} {number} {unit}{'s' * (number != 1)}"
    for name, words in NUMBERS.items():
        if name in numbers:
            number = numbers[name]
            return f"{words} {number:g}" if isinstance(number, float) else f"{words} {number}"
    if kind in KINDS:
        return KINDS[kind]
    if kind.startswith("string_"):
        return "a text"
    return message.removeprefix("Input should be ")


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "bool", "constrained"))
