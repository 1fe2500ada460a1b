"""Open WebUI: its server lists our model and passes a chat and a stream on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

PORT = 8097


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


with TemporaryDirectory() as folder:
    env = {"DATA_DIR": folder, "WEBUI_AUTH": "False", "ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True"}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "WEBUI_SECRET_KEY": "x",
        "RAG_EMBEDDING_ENGINE": "openai",
        "ANONYMIZED_TELEMETRY": "F",
    }
    env |= {"OPENAI_API_BASE_URLS": os.environ["OPENAI_BASE_URL"], "OPENAI_API_KEYS": os.environ["OPENAI_API_KEY"]}
    command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    process = subprocess.Popen(command, env=os.environ | env, stdout=sys.stderr)
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120)
        while process.poll() is None:
            try:
                if client.get("/health").is_success:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        client.headers["authorization"] = f"Bearer {token}"
        models = [model["id"] for model in client.get("/api/models").json()["data"]]
        assert os.environ["MODEL"] in models
        print("models:", models)
        chat = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "What is a brick?"}]}
        chat |= {"max_tokens": 24, "temperature": 0}
        whole = client.post("/api/chat/completions", json=chat | {"stream": False}).json()
        text = whole["choices"][0]["message"]["content"]
        with client.stream("POST", "/api/chat/completions", json=chat | {"stream": True}) as response:
            found = events(response)
        pieces = [one["choices"][0]["delta"].get("content") or "" for one in found if one.get("choices")]
        assert "".join(pieces) == text
        print("chat and stream:", repr(text)[:60])
    finally:
        process.terminate()
        process.wait()
