"""pydantic-ai: text and a typed output on the chat and the Responses API."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Town(BaseModel):
    name: str = Field(max_length=20)
    people: int


settings = {"temperature": 0, "max_tokens": 60}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(os.environ["MODEL"])
    text = Agent(model, model_settings=settings).run_sync("What is a brick?").output
    town = Agent(model, output_type=Town, model_settings=settings).run_sync("Name a town and its people.").output
    print(f"{kind.__name__}:", repr(text)[:40], town)
