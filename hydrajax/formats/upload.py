"""Upload an export to the Hugging Face Hub (`hydrajax.formats.hub`)."""

import os
from pathlib import Path

from hydrajax.errors import HydrajaxError
from hydrajax.formats.hub import NEVER, READ, is_repository, reason

WHAT = "push"
WRITTEN = (*READ, "*.pt", "README.md")


def push(directory: str | Path, repository: str, *, private: bool = False, message: str | None = None) -> str:
    """Upload an export in one commit and return the commit's URL.

    Only files that an export writes are uploaded, and no file on the Hub is deleted.

    Args:
        repository: ``org/name``, created if needed.
        private: create it as private; by default the owner's default visibility.

    Raises:
        HydrajaxError: the upload fails, a ``private`` repository exists as public, or a file is a link out of the
            directory.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):
        raise HydrajaxError(f"{WHAT}: no such directory: {directory}")
    if not os.path.isfile(directory / "config.json"):
        raise HydrajaxError(f"{WHAT}: {directory} has no config.json, expected an exported directory")
    if not is_repository(repository):
        raise HydrajaxError(f"{WHAT}: repository: got {repository!r}, expected a name such as 'org/name'")

    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.utils import filter_repo_objects

    try:
        found = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
        files = list(filter_repo_objects(found, allow_patterns=list(WRITTEN), ignore_patterns=list(NEVER)))
        for file in files:  # in a directory from elsewhere it may lead to a secret of this machine
            if not (directory / file).resolve().is_relative_to(directory.resolve()):
                raise HydrajaxError(f"{WHAT}: {directory / file} is a link out of {directory}")
        if get_token() is None:
            raise HydrajaxError(f"{WHAT}: not logged in to the Hub: run `hf auth login` or set HF_TOKEN")
        api = HfApi()
        api.create_repo(repository, private=private or None, exist_ok=True)  # False would override the owner's default
        if private and not api.model_info(repository).private:
            raise HydrajaxError(f"{WHAT}: private: '{repository}' exists and is public")
        # Not upload_folder, whose several commits may leave a part of the files there.
        additions = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=directory / file) for file in files]
        return api.create_commit(repository, additions, commit_message=message or "Upload from hydrajax").commit_url
    except HydrajaxError:
        raise
    except Exception as error:  # as in `downloaded`
        raise HydrajaxError(f"{WHAT}: cannot upload to '{repository}': {reason(error, repository)}") from None
