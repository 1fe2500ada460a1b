"""OpenAI's Python client: models, chat, streams, structured output, tools, log-probabilities, Responses."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

model, client = os.environ["MODEL"], OpenAI()
messages = [{"role": "user", "content": "Which is the largest city of France?"}]
own = {"model": model, "max_tokens": 40, "temperature": 0}


class Answer(BaseModel):
    city: Literal["Paris", "Lyon"]
    people: int


assert model in [one.id for one in client.models.list()]
whole = client.chat.completions.create(messages=messages, **own)
text = whole.choices[0].message.content
events = list(
    client.chat.completions.create(messages=messages, stream=True, stream_options={"include_usage": True}, **own)
)
assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == text
assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
print("chat and stream:", repr(text)[:40], whole.metrics["speculative_decoding"])
parsed = client.chat.completions.parse(messages=messages, response_format=Answer, **own)
print("structured output:", parsed.choices[0].message.parsed)
tool = {"type": "function", "function": {"name": "answer", "parameters": Answer.model_json_schema()}}
called = client.chat.completions.create(messages=messages, tools=[tool], tool_choice="required", **own)
print("tool:", Answer.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments))
scored = client.completions.create(prompt="A brick is", logprobs=0, echo=True, **own | {"max_tokens": 0})
print("echo:", scored.choices[0].logprobs.token_logprobs)
own = {"model": model, "max_output_tokens": 40, "temperature": 0}
first = client.responses.create(input=messages, **own)
with client.responses.stream(input=messages, **own) as stream:
    assert stream.get_final_response().output_text == first.output_text == text
second = client.responses.parse(input="And a number?", previous_response_id=first.id, text_format=Answer, **own)
print("responses:", second.output_parsed)
