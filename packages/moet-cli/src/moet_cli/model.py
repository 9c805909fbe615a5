"""Where a model comes from: a folder, the Hugging Face hub, or made on the spot."""

import hashlib
import importlib.util
import os
import re
from enum import Enum
from pathlib import Path

from moet_core.errors import ConfigError
from moet_vllm import tinymoe

__all__ = ["ModelKind", "fetch_model", "kind_of", "local_folder", "planned_folder"]

# The hub's own rule: words joined by single dots and dashes.
_NAME = r"\w+(?:[.-]\w+)*"
_HUB_ID = re.compile(f"{_NAME}/{_NAME}", re.ASCII)
_SYNTHETIC = "synthetic:"
_PACKAGED = "tinymoe"
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]


class ModelKind(Enum):
    """Kinds of models.

    FOLDER: a checkpoint on this machine.
    HUB: an id of the Hugging Face hub, downloaded once.
    SYNTHETIC: random weights in a given source format, made once.
    PACKAGED: the trained model that comes with moet.
    """

    FOLDER = "folder"
    HUB = "hub"
    SYNTHETIC = "synthetic"
    PACKAGED = "packaged"


def kind_of(model: str) -> ModelKind:
    """Tell what kind of model a name stands for; an existing folder is never a hub id."""
    if model.startswith(_SYNTHETIC):
        return ModelKind.SYNTHETIC
    if model == _PACKAGED:
        return ModelKind.PACKAGED
    if not _path(model).is_dir() and _HUB_ID.fullmatch(model):
        return ModelKind.HUB
    return ModelKind.FOLDER


def local_folder(model: str) -> Path | None:
    """Return the folder that holds the model already, None if it is not on this machine."""
    kind = kind_of(model)
    if kind is ModelKind.FOLDER:
        if not _path(model).is_dir():
            raise ConfigError(f"There is no model folder {model}.")
        return _path(model)
    if kind is ModelKind.PACKAGED:
        return tinymoe.CHECKPOINT
    if kind is ModelKind.SYNTHETIC:
        folder = _synthetic_folder(model)
        return folder if folder.is_dir() else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def fetch_model(model: str) -> Path:
    """Return the model's folder; download or make it first if need be.

    Raises:
        ConfigError: no such folder, no such hub model, or the hub cannot be reached.
    """
    kind = kind_of(model)
    if kind is ModelKind.SYNTHETIC:
        return local_folder(model) or _make(model)
    if kind is ModelKind.HUB:
        return _download(model)
    folder = local_folder(model)
    assert folder is not None
    return folder


def planned_folder(model: str) -> str:
    """Return what the server will be told to load; the id itself for a model not downloaded yet."""
    if kind_of(model) is ModelKind.SYNTHETIC:
        return str(_synthetic_folder(model))
    return str(local_folder(model) or model)


def _path(model: str) -> Path:
    return Path(model).expanduser()


def _synthetic_folder(model: str) -> Path:
    """Return a folder of the cache that is another one when the maker's code changes."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    maker = importlib.util.find_spec("moet_vllm.synthetic")
    assert maker is not None
    assert maker.origin is not None
    version = hashlib.sha256(Path(maker.origin).read_bytes()).hexdigest()[:12]
    return cache / "moet" / f"synthetic-{model.removeprefix(_SYNTHETIC)}-{version}"


def _make(model: str) -> Path:
    from moet_vllm.synthetic import write_checkpoint  # imports torch

    source = model.removeprefix(_SYNTHETIC)
    return write_checkpoint(_synthetic_folder(model), source=source)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES))
    except GatedRepoError as error:
        raise ConfigError(
            f"The Hugging Face model {model} needs a licence that you have not accepted; accept it "
            "on its page, then run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model} is neither a folder here nor a Hugging Face model that you may read."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise ConfigError(
            f"{model} is not a folder here, and Hugging Face cannot be reached to download it "
            f"({type(error).__name__}); name a folder that holds the model, or go online."
        ) from error
