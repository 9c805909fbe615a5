from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from moet_cli.model import ModelKind, fetch_model, kind_of, local_folder, planned_folder
from moet_core.errors import ConfigError


@pytest.fixture
def hub(monkeypatch):
    """Return a function that decides what a download does."""

    def decide(answer):
        def snapshot_download(*_args, **_kwargs):
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    return decide


class TestKind:
    def test_by_name(self):
        assert kind_of("synthetic:nvfp4") is ModelKind.SYNTHETIC
        assert kind_of("owner/name") is ModelKind.HUB
        assert kind_of("/a/folder") is ModelKind.FOLDER
        assert kind_of("../model") is ModelKind.FOLDER

    def test_an_existing_folder_is_never_a_hub_id(self, tmp_path, monkeypatch):
        (tmp_path / "owner/name").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert kind_of("owner/name") is ModelKind.FOLDER


class TestHub:
    def test_a_download_gives_its_folder(self, hub):
        hub("/cache/snapshot")
        assert fetch_model("owner/name") == Path("/cache/snapshot")

    def test_a_model_that_is_not_here_yet(self, hub):
        hub(LocalEntryNotFoundError("not cached"))
        assert local_folder("owner/name") is None
        assert planned_folder("owner/name") == "owner/name"

    def test_offline(self, hub):
        hub(LocalEntryNotFoundError("not cached"))
        with pytest.raises(ConfigError, match=r"owner/name is not a folder here, and .* go online"):
            fetch_model("owner/name")


class TestFolder:
    def test_missing(self):
        with pytest.raises(ConfigError, match="no model folder /no/such"):
            fetch_model("/no/such")

    def test_home_is_expanded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "m").mkdir()
        assert fetch_model("~/m") == tmp_path / "m"


def test_tinymoe_comes_with_moet():
    folder = local_folder("tinymoe")
    assert kind_of("tinymoe") is ModelKind.PACKAGED
    assert fetch_model("tinymoe") == folder
    assert (folder / "model.safetensors").is_file()


def test_a_synthetic_model_lies_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert planned_folder("synthetic:fp8").startswith(str(tmp_path / "moet/synthetic-fp8-"))
    assert local_folder("synthetic:fp8") is None
