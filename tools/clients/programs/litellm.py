"""LiteLLM: a completion, a stream, a tool and a response."""

import os

import litellm

model = f"openai/{os.environ['MODEL']}"
messages = [{"role": "user", "content": "What is a brick?"}]
own = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
whole = litellm.completion(**own).choices[0].message.content
pieces = [event.choices[0].delta.content or "" for event in litellm.completion(stream=True, **own)]
assert "".join(pieces) == whole
print("completion and stream:", repr(whole)[:60])
schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
called = litellm.completion(tools=[tool], tool_choice="required", **own | {"max_tokens": 60})
print("tool:", called.choices[0].message.tool_calls[0].function.arguments)
answer = litellm.responses(model=model, input="What is a brick?", max_output_tokens=24, temperature=0)
assert answer.output[0].content[0].text == whole
print("responses: the same text")
