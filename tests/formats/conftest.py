"""A tiny base, its files' content, and the Hub as huggingface_hub sees it: a small server in this process."""

import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from safetensors.torch import load_file

from helpers.every_format import write_formats
from hydrajax.formats.huggingface import load_llama
from hydrajax.models.base_model import BoundBase


class FakeHub:
    """A server of the part of the Hub's protocol that the package uses. ``log`` has its requests."""

    def __init__(self):
        self.repositories: dict[str, dict[str, str]] = {}  # name: {branch or tag: commit}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool | None] = {}  # as the repository was created
        self.gated: set[str] = set()
        self.messages: list[str] = []
        self.fails: tuple[str, int, dict] = ("(?!)", 500, {})  # pattern of paths, status, headers
        self.log: list[str] = []
        handler = type("Handler", (Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        commit = hashlib.sha1(repr((name, revision, sorted(files.items()))).encode()).hexdigest()
        self.repositories.setdefault(name, {})[revision] = commit
        self.commits[commit] = files
        return commit

    def fetched(self) -> set[str]:
        """Return the paths of all requested files."""
        return {unquote(line.split("/resolve/")[1].split("/", 1)[1]) for line in self.log if "/resolve/" in line}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self):
        self.hub.log.append(f"{self.command} {self.path}")
        path = urlsplit(self.path).path
        pattern, status, headers = self.hub.fails
        if re.search(pattern, path):
            return self.answer({"error": "it\nfailed"}, status, **headers)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            name, what, revision = found.groups()
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, revision, what = found.groups()
        else:
            return self.answer({}, 404)
        if name not in self.hub.repositories:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        revision = unquote(revision or "main")
        commit = self.hub.repositories[name].get(revision, revision)
        if commit not in self.hub.commits:
            return self.answer({"error": f"Invalid rev id: {revision}"}, 404, X_Error_Code="RevisionNotFound")
        files = self.hub.commits[commit]
        if "/resolve/" in path:
            if name in self.hub.gated:
                return self.answer({"error": "Access is restricted"}, 403, X_Error_Code="GatedRepo")
            content = files[unquote(what)]
            return self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=commit)
        if what == "tree":
            return self.answer(
                [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
            )
        siblings = [{"rfilename": file} for file in files]
        return self.answer(
            {"id": name, "sha": commit, "private": bool(self.hub.private.get(name)), "siblings": siblings}
        )

    do_HEAD = do_GET

    def do_POST(self):
        self.hub.log.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path
        pattern, status, headers = self.hub.fails
        if re.search(pattern, path):
            return self.answer({"error": "it\nfailed"}, status, **headers)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.headers["Authorization"] != "Bearer hf_secret":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repositories:
                return self.answer({"error": "You already created this model repo"}, 409, url=f"{self.hub.url}/{name}")
            self.hub.add(name, {})
            visibility = asked.get("visibility")  # None uses the owner's default
            self.hub.private[name] = visibility and visibility == "private"
            return self.answer({"url": f"{self.hub.url}/{name}"})
        name, what = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path).groups()
        if what == "preupload":
            files = json.loads(body)["files"]
            return self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        self.hub.messages += [line["value"]["summary"] for line in lines if line["key"] == "header"]
        commit = self.hub.add(name, files)
        return self.answer({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})

    def answer(self, content, status: int = 200, url: str | None = None, **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content | {"url": url} if url else content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def _no_proxy():
    """One HTTP client for all tests, as it is slow to create; it ignores proxies of the environment."""
    from huggingface_hub import close_session

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("NO_PROXY", "no_proxy"):
            patch.setenv(variable, "127.0.0.1")
        close_session()
        yield
        close_session()


@pytest.fixture
def hub(_no_proxy, tmp_path, monkeypatch):
    """A running `FakeHub` in place of the Hub, with an empty cache and no login."""
    from huggingface_hub import constants

    server = FakeHub()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # read from the environment when it was imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    monkeypatch.chdir(tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def base(tiny_checkpoint) -> BoundBase:
    return BoundBase(*load_llama(tiny_checkpoint))


@pytest.fixture(scope="module")
def base_state(tiny_checkpoint) -> dict:
    return load_file(tiny_checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def base_config(tiny_checkpoint) -> dict:
    return json.loads((tiny_checkpoint / "config.json").read_text())


@pytest.fixture(scope="session")
def formats(tmp_path_factory) -> Path:
    """Return a folder with a directory of every format (`helpers.every_format`), which tests must not change."""
    write_formats(root := tmp_path_factory.mktemp("formats"))
    return root
