"""The Hugging Face Hub: downloading a model or draft heads by name, and uploading an export.

All requests go through huggingface_hub, with its cache, its login and its environment variables (``HF_HOME``,
``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``). Only files that hydrajax reads are fetched. None can hold code but
the ``.pt`` that `hydrajax.formats.fetch` is asked for, and of that only tensors are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydrajax import assets
from hydrajax.errors import HydrajaxError, one_line

WHAT = "push"

# Patterns of huggingface_hub, whose `*` crosses folders.
READ = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "adapter_config.json",  # PEFT's
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tree_b*.json",  # of hydrajax tree search
    "params/*",  # orbax names its files as it likes
)
WRITTEN = (*READ, "*.pt", "README.md")
NEVER = tuple(f"*/*.{kind}" for kind in ("safetensors*", "bin", "ckpt", "pickle", "pkl", "pt", "pth", "py"))

REPOSITORY = re.compile(r"\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
# What git allows in the name of a branch or tag, nearly; it becomes a path in the cache, so no `..` and no leading `/`.
REVISION = re.compile(r"(?!.*\.\.)[^\s\x00-\x1f~^:?*\[\\/.-][^\s\x00-\x1f~^:?*\[\\]*")


def resolve(name: str | Path, flag: str) -> Path:
    """The local directory for what a user gave as ``flag``.

    An existing directory is taken as it is. Then come the names of what is shipped: ``shipped`` for a base, ``medusa``,
    ``hydra``, ``hydra++`` or ``draft-model`` for the argument ``draft``. Any other name is that of a repository on the
    Hub, ``org/name`` or ``org/name@revision`` (a branch, tag or commit), and what hydrajax reads of it is downloaded
    into huggingface_hub's cache. Without a network, a copy in the cache will do. Raises `HydrajaxError` for anything
    else.
    """
    folder = downloaded(name, flag, READ)
    if os.path.isdir(name) or any(folder.glob("*.safetensors")) or (folder / "params").is_dir():
        return folder
    raise HydrajaxError(
        f"{flag}: '{name}' is no directory here, and the Hub's repository (or without a network, its cached copy) "
        "has no safetensors files and no folder params/; legacy .bin and .pt files are read from a local directory "
        f"only, and 'hydrajax convert fetch {name} --output DIR' makes one of heads in a .pt file"
    )


def downloaded(name: str | Path, flag: str, files: Sequence[str]) -> Path:
    """`resolve` for files of these names, patterns of huggingface_hub, and without a look at what there is."""
    text = str(name)
    if os.path.isdir(text):
        return Path(name)
    shipped = {"draft": assets.SHIPPED_DRAFTS, "adapter": {}}.get(flag, assets.SHIPPED_BASE)
    if text in shipped:
        return assets.path(shipped[text])
    repository, at, revision = text.partition("@")
    if os.path.exists(text) or not _is_repository(repository) or (at and not REVISION.fullmatch(revision)):
        raise HydrajaxError(f"{flag}: no such directory: {text}")

    from huggingface_hub import snapshot_download  # slow to import

    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(files), ignore_patterns=list(NEVER)
        )
    except Exception as error:  # the library's, its HTTP client's, its storage backend's or the disk's
        reason = _reason(error, repository, revision)
        raise HydrajaxError(f"{flag}: '{text}' is no directory here, and {reason}") from None
    return Path(folder)


def push(directory: str | Path, repository: str, *, private: bool = False, message: str | None = None) -> str:
    """Upload an exported directory to the Hub in one commit and return the commit's URL.

    The repository is created if need be, with ``private`` or else the owner's default visibility. Only files that an
    export holds are uploaded; others that lie in the directory stay here, and files on the Hub that are not in the
    directory stay there. Raises `HydrajaxError` if anything fails, also if a ``private`` repository exists as public or
    a file is a link that leads out of the directory.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):
        raise HydrajaxError(f"{WHAT}: no such directory: {directory}")
    if not os.path.isfile(directory / "config.json"):
        raise HydrajaxError(f"{WHAT}: {directory} has no config.json, an exported directory is needed")
    if not _is_repository(repository):
        raise HydrajaxError(f"{WHAT}: repository is {repository!r}, a name such as 'org/name' is needed")

    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils import filter_repo_objects

    try:
        found = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        files = list(filter_repo_objects(found, allow_patterns=list(WRITTEN), ignore_patterns=list(NEVER)))
        for file in files:  # a directory from elsewhere may name a file of this machine that nobody should see
            if not (directory / file).resolve().is_relative_to(directory.resolve()):
                raise HydrajaxError(f"{WHAT}: {directory / file} is a link that leads out of {directory}")
        if get_token() is None:
            raise HydrajaxError(f"{WHAT}: not logged in to the Hub: run `hf auth login` or set HF_TOKEN")
        api = HfApi()
        api.create_repo(repository, private=private or None, exist_ok=True)  # False would override the owner's default
        if private and not api.model_info(repository).private:
            raise HydrajaxError(f"{WHAT}: '{repository}' is to be private, but exists and is public")
        # Not upload_folder: it may upload in several commits, and so leave half of the files there.
        additions = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=directory / file) for file in files]
        return api.create_commit(repository, additions, commit_message=message or "Upload from hydrajax").commit_url
    except HydrajaxError:
        raise
    except Exception as error:  # as in `resolve`
        raise HydrajaxError(f"{WHAT}: cannot upload to '{repository}': {_reason(error, repository)}") from None


def _is_repository(text: str) -> bool:
    """Whether the Hub allows this name; a local path with one `/` may also pass."""
    return bool(REPOSITORY.fullmatch(text)) and not re.search(r"--|\.\.|\.git$", text)


def _reason(error: BaseException, repository: str, revision: str = "") -> str:
    """Why huggingface_hub failed, in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        # The Hub was no help, for the reason in the cause, and neither was the cache.
        return f"{_reason(error.__cause__, repository, revision)}; the cache has no complete copy"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "huggingface_hub is offline (HF_HUB_OFFLINE is set)"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repository}"
        return f"the Hub's repository is gated: accept its terms at {page} and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hub has no such repository (or it is private and you are not logged in)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub's repository has no branch, tag or commit '{revision}'"
    if isinstance(error, errors.HfHubHTTPError):
        answer = f"the Hub answered {error.response.status_code} {error.response.reason_phrase}"
        if error.server_message:
            answer += f": {one_line(error.server_message)}"
        if error.response.status_code in (401, 403):
            answer += "; is the right user logged in (`hf auth login`)?"
        return answer
    if isinstance(error, OSError) and error.strerror:  # the disk; what the network raises has no strerror
        return f"a file cannot be read or written: {error.strerror}: {error.filename or constants.HF_HUB_CACHE}"
    return f"the exchange with {constants.ENDPOINT} failed: {one_line(f'{type(error).__name__}: {error}')}"
