"""Simon Willison's ``llm``: a prompt, streamed and whole, and a schema, by its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

model = {"model_id": "hydrajax", "model_name": os.environ["MODEL"], "api_base": os.environ["OPENAI_BASE_URL"]}
model |= {"supports_schema": True, "supports_tools": True, "api_key_name": "openai"}
with TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    del os.environ["OPENAI_BASE_URL"]
    os.environ["LLM_USER_PATH"] = folder

    def ask(*options: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "hydrajax", "-o", "max_tokens", "40", "-o", "temperature", "0"]
        return subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    text = ask("--no-stream", "What is a brick?")
    assert ask("What is a brick?") == text
    print("prompt and stream:", repr(text)[:60])
    print("schema:", json.loads(ask("--schema", "number int", "How many bricks?")))
