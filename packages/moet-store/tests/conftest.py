from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from moet_store import PackSpec, PackWriter, bytes_identity
from moet_store.errors import PackError

settings.register_profile("moet", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("moet")


@pytest.fixture(scope="session")
def make_spec():
    """Make a small specification; keyword arguments replace its fields."""

    def make(**fields):
        values = {
            "checkpoint": bytes_identity(b"a checkpoint"),
            "codec": "raw",
            "layout": "rows-v1",
            "hidden": 64,
            "intermediate": 32,
            "payload_bytes": 5000,
            "layers": (1, 2, 5),
            "experts": 4,
        }
        return PackSpec(**(values | fields))

    return make


@pytest.fixture(scope="session")
def row_of():
    """Make the payload of a row: different for every place, always the same."""

    def make(spec, layer, expert):
        random = np.random.default_rng([layer, expert])
        return random.integers(0, 256, spec.payload_bytes, dtype=np.uint8)

    return make


@pytest.fixture(scope="session")
def rows_of(row_of):
    """Make the rows of a layer that a specification holds."""
    return lambda spec, layer: [row_of(spec, layer, expert) for expert in spec.held]


@pytest.fixture
def make_pack(tmp_path, make_spec, rows_of):
    """Write a pack, or the layers `written` of it; returns its path and specification."""

    def make(folder=tmp_path, spec=None, written=None, **fields):
        spec = spec or make_spec(**fields)
        folder.mkdir(exist_ok=True)
        with PackWriter(folder, spec) as writer:
            for layer in spec.layers if written is None else written:
                writer.write_layer(layer, rows_of(spec, layer))
        return writer.path, spec

    return make


@pytest.fixture(scope="session")
def refused():
    """Return a context manager that expects a PackError of a kind, and yields what was caught."""

    @contextmanager
    def expect(kind):
        with pytest.raises(PackError) as caught:
            yield caught
        assert caught.value.kind is kind, caught.value

    return expect


@pytest.fixture(scope="session")
def folder_bytes():
    """Read every file of a folder but the locks, which are empty."""

    def read(folder: Path):
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".lock"}

    return read
