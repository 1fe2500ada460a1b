"""The Hugging Face Hub: download a model or draft heads by name. `hydrajax.formats.upload` uploads an export.

Requests go through huggingface_hub, with its cache, login and environment variables (``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT``, ``HF_HUB_OFFLINE``). Only files that hydrajax reads are downloaded. None can contain code, except the
``.pt`` of `hydrajax.formats.fetch`, from which only tensors are read.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hydrajax import assets, plugins
from hydrajax.errors import HydrajaxError, nearest_first, one_line
from hydrajax.formats.fingerprint import shapes_of
from hydrajax.formats.tensors import GGUF_INDEX, GGUF_SUFFIX
from hydrajax.models.llama_config import LlamaConfig
from hydrajax.plugins import outdated

# Patterns of huggingface_hub, whose `*` crosses folders.
READ = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    "adapter_config.json",  # PEFT's
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "tree_b*.json",  # of hydrajax tree search
    "params/*",  # orbax's files
)
NEVER = tuple(f"*/*.{kind}" for kind in ("safetensors*", "bin", "ckpt", "pickle", "pkl", "pt", "pth", "py"))

REPOSITORY = re.compile(r"\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
# Roughly git's rule for branches and tags. It becomes a path in the cache, so no `..` and no leading `/`.
REVISION = re.compile(r"(?!.*\.\.)[^\s\x00-\x1f~^:?*\[\\/.-][^\s\x00-\x1f~^:?*\[\\]*")


def resolve(name: str | Path, flag: str, base: LlamaConfig | None = None) -> Path:
    """Return a local directory, downloaded if needed; without a network a cached copy is used.

    Args:
        name: a directory; a GGUF file, which is described by a directory in the cache (`hydrajax.lowbit.gguf`); the
            name of a bundled model (``shipped`` for a base; one of `hydrajax.assets.DRAFT_NAMES` for a draft); for a
            base one of `hydrajax.formats.known_bases`; or ``org/name`` or ``org/name@revision`` (branch, tag or
            commit) on the Hub.
        flag: ``base``, ``draft`` or ``adapter``; begins error messages.
        base: configuration of a draft's base, for which a bundled draft is chosen; by default the shipped base.

    Raises:
        HydrajaxError: no such directory or repository, a failed download, or no weights that hydrajax reads.
    """
    if flag == "draft" and str(name) in assets.DRAFT_NAMES and not os.path.isdir(name):
        return assets.draft(str(name), None if base is None else shapes_of(base))
    folder = downloaded(name, flag, READ)
    weights = any(folder.glob("*.safetensors")) or (folder / "params").is_dir() or (folder / GGUF_INDEX).is_file()
    if weights or os.path.isdir(name):
        return folder
    raise HydrajaxError(
        f"{flag}: '{name}' is no local directory, and the Hub's repository (or without a network, its cached copy) has "
        f"no safetensors files and no folder params/; convert heads in a .pt file with 'hydrajax convert fetch {name} "
        "--output DIR'; .bin files are read from a local directory only"
    )


def downloaded(name: str | Path, flag: str, files: Sequence[str]) -> Path:
    """Return the directory as `resolve` does, with these files (huggingface_hub's patterns), without checking it."""
    text = str(name)
    if os.path.isdir(text):
        return Path(name)
    if text.endswith(GGUF_SUFFIX):
        if not os.path.isfile(text):
            raise HydrajaxError(f"{flag}: no such file: {text}")
        return plugins.find("base_files", "gguf").described(text, flag)
    if flag not in ("draft", "adapter"):
        if text in assets.SHIPPED_BASE:
            return assets.path(assets.SHIPPED_BASE[text])
        if text in _known_bases().KNOWN_BASES:
            gguf = plugins.find("base_files", "gguf")
            gguf.check_installed(flag)  # before the file is downloaded
            return gguf.described(_known_bases().known_base_file(text, flag), flag)
    repository, at, revision = text.partition("@")
    if os.path.exists(text) or not is_repository(repository) or (at and not REVISION.fullmatch(revision)):
        raise HydrajaxError(f"{flag}: no such directory: {text}{_known_names(text, flag)}")

    from huggingface_hub import snapshot_download  # slow to import

    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(files), ignore_patterns=list(NEVER)
        )
    except Exception as error:  # of the library, its HTTP client, its storage backend or the disk
        raise HydrajaxError(
            f"{flag}: '{text}' is no local directory, and {reason(error, repository, revision)}"
        ) from None
    return Path(folder)


def _known_names(text: str, flag: str) -> str:
    """Return the end of the message for an unknown name: the known names, the nearest first."""
    if flag == "adapter" or not text or os.path.exists(text) or re.search(r"[/\\]|^\.", text):
        return ""  # a path
    if flag == "draft":
        from hydrajax.formats.draft_ref import OWN
        from hydrajax.formats.draft_registry import FILES, without_weights  # which imports drafters

        if text in FILES and text not in assets.DRAFT_NAMES:
            return f"; '{text}' is a kind of draft with weights: name the directory with its files"
        names, older = dict.fromkeys([*without_weights(), OWN, *assets.DRAFT_NAMES]), outdated()
    else:
        names, older = dict.fromkeys([*assets.SHIPPED_BASE, *_known_bases().KNOWN_BASES]), ""
    return f"; known names: {', '.join(nearest_first(text, names))}{older}"


def _known_bases() -> ModuleType:
    from hydrajax.formats import known_bases  # for names that are neither bundled nor directories

    return known_bases


def without_hub(name: str | Path, flag: str) -> Path:
    """Return the directory of a base without asking the Hub: of a GGUF file, a known or bundled base, else ``name``."""
    named = str(name).endswith(GGUF_SUFFIX) or str(name) in (*assets.SHIPPED_BASE, *_known_bases().KNOWN_BASES)
    return downloaded(name, flag, ()) if named else Path(name)


def is_repository(text: str) -> bool:
    """Return True for a name that the Hub allows; a local path with one `/` may also pass."""
    return bool(REPOSITORY.fullmatch(text)) and not re.search(r"--|\.\.|\.git$", text)


def reason(error: BaseException, repository: str, revision: str = "") -> str:
    """Explain an error of huggingface_hub in one line."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return f"{reason(error.__cause__, repository, revision)}; the cache has no complete copy"
    gated = f"accept its terms at {constants.ENDPOINT}/{repository} and log in with `hf auth login`"
    for kind, explained in (  # GatedRepoError is a RepositoryNotFoundError
        (errors.OfflineModeIsEnabled, "huggingface_hub is offline (HF_HUB_OFFLINE is set)"),
        (errors.GatedRepoError, f"the Hub's repository is gated: {gated}"),
        (errors.RepositoryNotFoundError, "the Hub has no such repository (or it is private and you are not logged in)"),
        (errors.RevisionNotFoundError, f"the Hub's repository has no branch, tag or commit '{revision}'"),
    ):
        if isinstance(error, kind):
            return explained
    if isinstance(error, errors.HfHubHTTPError):
        answer = f"the Hub answered {error.response.status_code} {error.response.reason_phrase}"
        if error.server_message:
            answer += f": {one_line(error.server_message)}"
        if error.response.status_code in (401, 403):
            answer += "; is the right user logged in (`hf auth login`)?"
        return answer
    if isinstance(error, OSError) and error.strerror:  # of the disk; network errors have no strerror
        return f"a file cannot be read or written: {error.strerror}: {error.filename or constants.HF_HUB_CACHE}"
    return f"the exchange with {constants.ENDPOINT} failed: {one_line(f'{type(error).__name__}: {error}')}"
