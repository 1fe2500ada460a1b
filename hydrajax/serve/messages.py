"""Messages and tools of conversations, as requests name them."""

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import pydantic
from pydantic import Discriminator, Field, StrictStr, Tag

from hydrajax.errors import one_of
from hydrajax.serve.json_objects import IGNORED, JsonObject, quoted

Part = TypeVar("Part")
FunctionName = Annotated[StrictStr, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
# A text or its parts. Tags in brackets are left out of the names of wrong fields.
TextOr = Annotated[
    Annotated[StrictStr, Tag("[text]")] | Annotated[list[Part], Tag("[parts]")],
    Discriminator(lambda content: "[parts]" if isinstance(content, list) else "[text]"),
]


class TextPart(JsonObject):
    type: Literal["text"]
    text: StrictStr

    @pydantic.field_validator("type", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value not in (kinds := get_args(cls.model_fields["type"].annotation)):
            raise ValueError(f"got {quoted(value)}, expected {one_of(kinds)}, as this server takes text only")
        return value


class CalledFunction(JsonObject):
    NEUTRAL: ClassVar = {"parsed_arguments": IGNORED}  # OpenAI's client adds it
    name: FunctionName
    arguments: StrictStr

    @pydantic.field_validator("arguments")
    @classmethod
    def _arguments_are_an_object(cls, value: str) -> str:
        try:
            valid = isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise ValueError(f"got {quoted(value)}, expected a JSON object as text")
        return value


class ToolCall(JsonObject):
    """A call in an assistant message of the conversation."""

    NEUTRAL: ClassVar = {"index": IGNORED}  # from a stream
    id: StrictStr
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call for chat templates, which write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(JsonObject):
    NEUTRAL: ClassVar = {"annotations": [], "tool_calls": [], "parsed": IGNORED}  # OpenAI's client adds parsed
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[TextPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None  # vLLM's name

    @pydantic.model_validator(mode="after")
    def _fields_of_the_role(self):
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError(f"tool_calls: got a list, expected none in a message of role {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError(f"tool_call_id: {'is missing' if self.role == 'tool' else 'requires role tool'}")
        if self.content is None and self.tool_calls is None:
            raise ValueError("content: is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for chat templates, which call OpenAI's developer the system."""
        content = self.content or ""
        if not isinstance(content, str):
            content = [part.model_dump() for part in content]
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls is not None:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        thought = self.reasoning_content or self.reasoning
        if thought and self.role == "assistant":  # as Qwen's templates name it, and gpt-oss's
            found |= {"reasoning_content": thought} | ({} if content else {"thinking": thought})
        if self.role == "tool":
            found |= {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})
        return found


class FunctionDefinition(JsonObject):
    NEUTRAL: ClassVar = {"strict": IGNORED}  # all arguments are valid under the schema
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(JsonObject):
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool for chat templates."""
        return self.model_dump(exclude_unset=True)


class FunctionReference(JsonObject):
    name: StrictStr


class NamedTool(JsonObject):
    type: Literal["function"]
    function: FunctionReference
