"""LangChain: messages, streams, structured output, tools and the Responses API."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Number(BaseModel):
    """A number of bricks."""

    number: int


own = {"model": os.environ["MODEL"], "temperature": 0, "max_tokens": 40}
model = ChatOpenAI(use_responses_api=False, **own)
whole = model.invoke("What is a brick?").content
assert "".join(piece.content for piece in model.stream("What is a brick?")) == whole
print("invoke and stream:", repr(whole)[:60])
for method in ("json_schema", "function_calling"):
    print(f"{method}:", model.with_structured_output(Number, method=method).invoke("How many bricks? Say a number."))
print("tool:", model.bind_tools([Number], tool_choice="Number").invoke("How many bricks?").tool_calls[0]["args"])
assert ChatOpenAI(use_responses_api=True, **own).invoke("What is a brick?").text == whole
print("responses: the same text")
