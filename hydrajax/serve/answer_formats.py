"""Fields of requests that give the form of answers: OpenAI's ``response_format``, vLLM's grammars."""

import json
from typing import Any, ClassVar, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, Field, StrictStr

from hydrajax.errors import HydrajaxError
from hydrajax.serve.json_objects import IGNORED, JsonObject

GUIDED = ("json", "regex", "choice", "grammar")  # the old fields of vLLM begin with guided_


class Wanted(NamedTuple):
    """The grammar that a request asks for: its kind as a field of `StructuredOutputs`, and the request's field."""

    kind: str
    value: Any
    field: str


class JsonSchema(JsonObject):
    NEUTRAL: ClassVar = {"strict": IGNORED}  # every answer is valid under the schema
    name: StrictStr
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None


class ResponseFormat(JsonObject):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Any] | None = None  # of structural tags, as triggers and format
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _schema_if_named(self):
        if (self.json_schema is not None) != (self.type == "json_schema"):
            missing = self.json_schema is None
            raise ValueError(f"json_schema: {'is missing' if missing else 'requires response_format.type=json_schema'}")
        for name in ("structures", "triggers", "format"):
            if getattr(self, name) is not None and self.type != "structural_tag":
                raise ValueError(f"{name}: requires response_format.type=structural_tag")
        return self


class StructuredOutputs(JsonObject):
    """vLLM's field of this name."""

    NEUTRAL: ClassVar = {
        "json_object": False, "disable_additional_properties": False,
        "disable_fallback": IGNORED, "disable_any_whitespace": IGNORED,  # there is one way to write JSON here
    }  # fmt: skip
    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | StrictStr | None = None

    @pydantic.model_validator(mode="after")
    def _is_one(self):
        if len(found := self.given()) != 1:
            got = " and ".join(found) or "none"
            raise ValueError(f"got {got}, expected one of json, regex, choice, grammar, json_object, structural_tag")
        return self

    def given(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class AnswerFormat(BaseModel):
    """The fields by which completions and chats ask for a grammar."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None

    def wanted(self) -> Wanted | None:
        """Return the grammar of the answers, None for free text. Raises `HydrajaxError` for several."""
        found = [
            Wanted(kind, value, f"guided_{kind}")
            for kind in GUIDED
            if (value := getattr(self, f"guided_{kind}")) is not None
        ]
        if self.structured_outputs is not None:
            [(kind, value)] = self.structured_outputs.given().items()
            found.append(Wanted(kind, value, f"structured_outputs.{kind}"))
        if self.response_format is not None and self.response_format.type != "text":
            found.append(_of_format(self.response_format))
        if len(found) > 1:
            raise HydrajaxError(f"{found[0].field}: got one with {found[1].field}, expected one of them")
        if not found or found[0].kind not in ("json", "structural_tag"):
            return found[0] if found else None
        return found[0]._replace(value=_object(found[0].value, found[0].field))


def _of_format(form: ResponseFormat) -> Wanted:
    if form.type == "structural_tag":
        return Wanted("structural_tag", form.model_dump(exclude_none=True), "response_format")
    if form.json_schema is None or form.json_schema.schema_ is None:
        return Wanted("json_object", True, "response_format")
    return Wanted("json", form.json_schema.schema_, "response_format.json_schema.schema")


def _object(value: dict[str, Any] | str, field: str) -> dict[str, Any]:
    """Return an object that may be given as a text of JSON."""
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HydrajaxError(f"{field}: got a text that is not a JSON object, expected an object")
    return found
