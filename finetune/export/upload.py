"""Uploads an export to a repository of the Hugging Face hub, when asked to and by name."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import ConfigError, MachineError, first_line


def check(name: str) -> None:
    """Raise ConfigError unless `name` is a valid repository name, MachineError if nobody is logged in."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"`--push {name}`: {first_line(error)}") from None
    if get_token() is None:
        raise MachineError("`--push` needs an account of the hub: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str) -> tuple[str, list[str]]:
    """Upload `folder` to the repository `name`, which is created as private if it does not exist.

    Returns its address, and the files left in it by earlier uploads (such as a GGUF file of another type).
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        # Completed with the account if that was left out.
        name = api.create_repo(name, private=True, exist_ok=True).repo_id
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Upload {folder.name}")
        files = {*api.list_repo_files(name)} - {".gitattributes", *(file.name for file in folder.iterdir())}
    except Exception as error:  # its HTTP library raises others from version to version
        raise MachineError(f"{folder} is written and proven, but not pushed to {name}: {first_line(error)}") from None
    return f"https://huggingface.co/{name}", sorted(files)
