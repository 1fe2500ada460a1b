"""instructor: a pydantic model by tools, and by a JSON schema."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Town(BaseModel):
    name: str = Field(max_length=20)
    people: int


own = {"model": os.environ["MODEL"], "temperature": 0, "max_tokens": 60, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    messages = [{"role": "user", "content": "Name a town and the number of its people."}]
    print(f"{mode.name}:", client.chat.completions.create(messages=messages, response_model=Town, **own))
