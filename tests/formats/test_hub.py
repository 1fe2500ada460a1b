"""The Hub: downloads, uploads and error messages, through huggingface_hub and a small local server."""

import errno
from pathlib import Path

import pytest

from hydrajax.errors import HydrajaxError
from hydrajax.formats.hub import resolve
from hydrajax.formats.upload import push

NAME = "org/name"
NOT_HERE = f"base: '{NAME}' is no local directory, and "
TEXTS = ("config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab")
MODEL = {f"{name}.json": b"{}" for name in (*TEXTS, "chat_template", "model.safetensors.index")} | {
    "tokenizer.model": b"pieces",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
}
NATIVE = {"config.json": b"{}", "params/_METADATA": b"{}", "params/d/0a1b": b"array", "params/manifest.ocdbt": b"m"}
UNREAD = {
    "README.md": b"# A model",
    "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"bin", "hydra_lm_head.pt": b"pt", "data.pkl": b"pickle",
    "code/tokenizer.json": b"{}", "onnx/model.safetensors": b"onnx", "original/model.safetensors.index.json": b"{}",
    "params/evil.py": b"raise SystemExit", "params/deep/evil.pkl": b"pickle", "params/model.safetensors": b"none",
    "other/params/_METADATA": b"{}",
}  # fmt: skip


def refused(message: str, act=resolve, *arguments, **more) -> None:
    """The call (by default of ``base org/name``) fails with exactly this line."""
    with pytest.raises(HydrajaxError) as caught:
        act(*(arguments or (NAME, "base")), **more)
    assert str(caught.value) == message


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_model_or_draft_without_what_is_not_read(hub):
    for name, files in ((NAME, MODEL), ("org/draft", NATIVE)):
        hub.add(name, files | UNREAD)
        assert contents(resolve(name, "draft")) == files
        assert hub.fetched() == files.keys()
        hub.log.clear()


@pytest.mark.parametrize("revision", ["v1.0+cpu", "refs/pr/3", "commit"])
def test_a_revision(hub, revision):
    old = {"config.json": b"old", "model.safetensors": b"old weights"}
    commit = hub.add(NAME, old, "main" if revision == "commit" else revision)
    hub.add(NAME, {"config.json": b"new", "model.safetensors": b"new weights"})
    revision = commit if revision == "commit" else revision
    assert contents(resolve(f"{NAME}@{revision}", "base")) == old
    assert contents(resolve(NAME, "base"))["config.json"] == b"new"
    assert contents(resolve(f"{NAME}@main", "base"))["config.json"] == b"new"


def test_a_newer_commit_is_fetched_and_an_old_file_is_not_fetched_again(hub):
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": b"old"})
    resolve(NAME, "base")
    hub.log.clear()
    hub.add(NAME, {"config.json": b"{}", "model.safetensors": b"new"})
    assert contents(resolve(NAME, "base")) == {"config.json": b"{}", "model.safetensors": b"new"}
    gets = [line for line in hub.log if line.startswith("GET") and "/resolve/" in line]
    assert len(gets) == 1
    assert gets[0].endswith("/model.safetensors")


def test_a_cached_copy_is_used_without_network(hub, monkeypatch):
    from huggingface_hub import constants

    commit = hub.add(NAME, MODEL)
    folder = resolve(NAME, "base")
    hub.log.clear()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert resolve(NAME, "base") == resolve(f"{NAME}@{commit}", "base") == folder
    assert not hub.log
    hub.fails = (f"/api/models/{NAME}", 503, {})
    assert resolve(NAME, "base") == folder
    hub.stop()
    assert resolve(NAME, "base") == folder


def test_a_directory_wins(hub, tmp_path):
    hub.add(NAME, MODEL)
    for name in (NAME, f"{NAME}@main"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve(name, "base") == Path(name)
    assert resolve(tmp_path, "base") == tmp_path
    assert not hub.log


NO_IDS = [
    *("", "name", "/org/name", "./name", "../name", "~/name", "~user/name", "org/name/", "a/b/c", "org/na me"),
    *("org/name.", "org/-name", "org/na--me", "org/na..me", "org/name.git", "org/näme", "org/name\n", "org/na\0me"),
    *("org/" + "n" * 97, "x" * 5000, "@main", "name@main", "org/name@", "org/name@/main", "org/name@../../main"),
    *("org/name@a/../../main", "org/name@a b", "org/name@-x", "org/name@a@{1}^"),
]


def test_no_name_of_a_repository(hub, tmp_path):
    for name in NO_IDS:
        with pytest.raises(HydrajaxError) as caught:
            resolve(name, "base")
        message, _, known = str(caught.value).partition("; known names: ")
        assert message == f"base: no such directory: {name}".replace("\n", " ")
        assert {*known.split(", ")} in ({""}, {"shipped", "smollm2"})
    refused(f"draft: no such directory: {tmp_path / 'none'}", resolve, tmp_path / "none", "draft")
    (tmp_path / "org").mkdir()
    (tmp_path / NAME).touch()
    refused(f"base: no such directory: {NAME}")  # a file
    assert not hub.log


def test_unknown_repository_and_revision(hub):
    reason = "the Hub has no such repository (or it is private and you are not logged in)"
    refused(NOT_HERE + reason)
    refused(f"draft: '{NAME}@v1' is no local directory, and {reason}", resolve, f"{NAME}@v1", "draft")
    hub.add(NAME, MODEL)
    for revision in ("v2", "0" * 40):
        reason = f"the Hub's repository has no branch, tag or commit '{revision}'"
        refused(f"base: '{NAME}@{revision}' is no local directory, and {reason}", resolve, f"{NAME}@{revision}", "base")


def test_gated(hub):
    hub.add(NAME, MODEL)
    hub.gated.add(NAME)
    terms = f"accept its terms at {hub.url}/{NAME} and log in with `hf auth login`"
    refused(f"{NOT_HERE}the Hub's repository is gated: {terms}")


@pytest.mark.parametrize("files", [UNREAD, {}, {"config.json": b"{}"}], ids=["legacy", "empty", "config"])
def test_no_weights(hub, files):
    hub.add(NAME, {file: content for file, content in files.items() if not file.startswith("params/")})
    refused(
        f"{NOT_HERE}the Hub's repository (or without a network, its cached copy) has no safetensors files and no "
        "folder params/; convert heads in a .pt file with 'hydrajax convert fetch "
        f"{NAME} --output DIR'; .bin files are read from a local directory only"
    )
    assert hub.fetched() == files.keys() & {"config.json"}


NO_COPY = "the cache has no complete copy"


def no_network(hub) -> str:
    return f"the exchange with {hub.url} failed: ConnectError: [Errno {errno.ECONNREFUSED}] Connection refused"


def test_no_network_and_no_copy(hub, monkeypatch):
    """Also after half a download."""
    hub.add(NAME, MODEL)
    hub.fails = ("00002.safetensors", 500, {})
    refused(f"{NOT_HERE}the Hub answered 500 Internal Server Error; {NO_COPY}")
    hub.stop()
    refused(f"{NOT_HERE}{no_network(hub)}; {NO_COPY}")
    hub.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(f"{NOT_HERE}huggingface_hub is offline (HF_HUB_OFFLINE is set); {NO_COPY}")
    assert not hub.log


def test_a_wrong_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    hub.fails = ("/api/models", 401, {"X_Error_Message": "Invalid credentials in Authorization header"})
    refused(
        f"{NOT_HERE}the Hub answered 401 Unauthorized: Invalid credentials in Authorization header it failed; "
        "is the right user logged in (`hf auth login`)?"
    )


def test_a_full_disk(hub, monkeypatch):
    hub.add(NAME, MODEL)

    def http_get(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    refused(f"{NOT_HERE}a file cannot be read or written: No space left on device: {Path('cache').absolute()}")


EXPORT = {
    "config.json": b"{}", "hydra_lm_head.safetensors": b"heads", "hydra_lm_head.pt": b"legacy",
    "README.md": b"---\nlicense: apache-2.0\n---\n# Heads\n",
    "tokenizer.json": b"{}", "chat_template.jinja": b"{{ messages }}", "params/_METADATA": b"{}",
    "params/d/0a1b": b"array",
}  # fmt: skip
KEPT = {".env": b"HF_TOKEN=secret", "notes.txt": b"mine"} | dict.fromkeys(
    ("train.py", "optimizer.bin", "logs/config.json", "logs/model.safetensors", "logs/model.pt", "params/code.py"), b""
)
KEPT[".git/config"] = b""


@pytest.fixture
def export(tmp_path) -> Path:
    for file, content in (EXPORT | KEPT).items():
        path = tmp_path / "export" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "export"


@pytest.fixture
def logged_in(hub, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


@pytest.mark.usefixtures("logged_in")
def test_push(hub, export):
    url = push(export, NAME)
    commit = hub.repositories[NAME]["main"]
    assert url == f"{hub.url}/{NAME}/commit/{commit}"
    assert hub.commits[commit] == EXPORT
    assert hub.private == {NAME: None}  # the owner's default
    read = {file: content for file, content in EXPORT.items() if file not in ("README.md", "hydra_lm_head.pt")}
    assert contents(resolve(NAME, "draft")) == read
    push(export, "org/mine", private=True, message="Step 100")
    (export / "config.json").write_bytes(b"[]")
    push(str(export), "org/mine", private=True, message="Step 200")
    assert hub.private["org/mine"] is True
    assert hub.messages == ["Upload from hydrajax", "Step 100", "Step 200"]
    assert hub.commits[hub.repositories["org/mine"]["main"]]["config.json"] == b"[]"
    hub.log.clear()
    refused(f"push: private: '{NAME}' exists and is public", push, export, NAME, private=True)
    assert not any("preupload" in line or "commit" in line for line in hub.log)


@pytest.mark.usefixtures("logged_in")
def test_push_follows_no_link_that_leads_out(hub, export, tmp_path):
    (export / "hydra_lm_head.safetensors").rename(export / "weights")
    (export / "hydra_lm_head.safetensors").symlink_to("weights")
    push(export, NAME)  # a link within the directory
    (tmp_path / "secret").write_text("of this machine")
    (export / "config.json").unlink()
    (export / "config.json").symlink_to(tmp_path / "secret")
    hub.log.clear()
    message = f"push: {export / 'config.json'} is a link out of {export}"
    refused(message, push, export, NAME)
    assert not hub.log


def test_push_needs_a_login(hub, export):
    refused("push: not logged in to the Hub: run `hf auth login` or set HF_TOKEN", push, export, NAME)
    assert not hub.log


LOGIN = "is the right user logged in (`hf auth login`)?"
FAILURES = {
    "no rights": ("/api/repos/create", 403, f"the Hub answered 403 Forbidden: it failed; {LOGIN}"),
    "read-only token": ("/commit/main", 403, f"the Hub answered 403 Forbidden: it failed; {LOGIN}"),
    "server": ("/api/repos/create", 500, "the Hub answered 500 Internal Server Error: it failed"),
    "server later": ("/preupload/", 500, "the Hub answered 500 Internal Server Error: it failed"),
    "model card": ("/api/validate-yaml", 400, "{exchange}ValueError: Invalid metadata in README.md."),
}


@pytest.mark.usefixtures("logged_in")
@pytest.mark.parametrize("case", FAILURES)
def test_push_fails(hub, export, case):
    path, status, reason = FAILURES[case]
    hub.fails = (path, status, {})
    reason = reason.format(exchange=f"the exchange with {hub.url} failed: ")
    refused(f"push: cannot upload to '{NAME}': {reason}", push, export, NAME)


@pytest.mark.usefixtures("logged_in")
def test_push_without_network_or_a_right_token(hub, export, monkeypatch):
    cannot = f"push: cannot upload to '{NAME}': "
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    refused(f"{cannot}the Hub answered 401 Unauthorized: Invalid username or password.; {LOGIN}", push, export, NAME)
    hub.stop()
    refused(f"{cannot}{no_network(hub)}", push, export, NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(f"{cannot}huggingface_hub is offline (HF_HUB_OFFLINE is set)", push, export, NAME)


@pytest.mark.usefixtures("logged_in")
def test_push_needs_an_export(hub, export, tmp_path):
    refused(f"push: no such directory: {tmp_path / 'none'}", push, tmp_path / "none", NAME)
    refused(f"push: {tmp_path} has no config.json, expected an exported directory", push, tmp_path, NAME)
    for name in ("name", "a/b/c", "org/name@main", "org/na--me", ""):
        refused(f"push: repository: got {name!r}, expected a name such as 'org/name'", push, export, name)
    assert not hub.log
