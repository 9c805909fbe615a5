"""A drafter's layers: which they are, who serves them, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend

from moet_core.errors import ConfigError
from moet_vllm.config import SCHEDULER, MoetConfig
from moet_vllm.drafter_head import is_drafter_head
from moet_vllm.formats import FLOAT, MXFP4, NVFP4
from moet_vllm.pool_engine import check_engine
from moet_vllm.routed_experts import _drafter_codec, in_main_stack, vllm_method

LAYER = "model.layers.9.mlp.experts"


class TestLayers:
    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("model.layers.8.mlp.experts", True),
            ("model.layers.9.mlp.experts", False),
            ("mtp.0.mlp.experts", False),
        ],
    )
    def test_a_drafter_comes_after_the_last_layer(self, name: str, wanted: bool) -> None:
        text = SimpleNamespace(num_hidden_layers=9)
        config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
        assert in_main_stack(name, config) is wanted

    @pytest.mark.parametrize(
        ("prefix", "wanted"),
        [
            ("model.layers.9.head", True),
            ("model.layers.61.shared_head.head", True),
            ("lm_head", False),
            ("language_model.lm_head", False),
            ("model.layers.9.header", False),
            ("", False),
        ],
    )
    def test_a_head_inside_a_layer_stands_in_for_the_models(
        self, prefix: str, wanted: bool
    ) -> None:
        assert is_drafter_head(prefix) is wanted


class TestWhoServes:
    def test_vllms_own_method_where_it_has_a_kernel(self) -> None:
        method: Any = SimpleNamespace(mxfp4_backend=Mxfp4MoeBackend.MARLIN)
        assert vllm_method(lambda: method) is method

    def test_no_kernel_as_an_error(self) -> None:
        def build() -> Any:
            raise NotImplementedError("No NvFp4 MoE backend supports the deployment configuration.")

        assert vllm_method(build) is None

    def test_no_kernel_as_a_value(self) -> None:
        method: Any = SimpleNamespace(mxfp4_backend=Mxfp4MoeBackend.NONE)
        assert vllm_method(lambda: method) is None

    def test_other_errors_are_not_taken_for_it(self) -> None:
        def build() -> Any:
            raise ValueError("moe_backend='nonsense' does not exist")

        with pytest.raises(ValueError, match="nonsense"):
            vllm_method(build)

    def test_fp4_is_kept_exactly(self) -> None:
        assert _drafter_codec(LAYER, NVFP4) == "fp4-nv"
        assert _drafter_codec(LAYER, MXFP4) == "fp4-mx"

    def test_what_has_no_exact_codec_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"float experts of the drafter's layer model\.layers"
        ):
            _drafter_codec(LAYER, FLOAT)


class TestPool:
    @staticmethod
    def engine(method: str | None, data_parallel: int = 1) -> Any:
        parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=data_parallel)
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
            model_config=SimpleNamespace(has_inner_state=False),
            speculative_config=SimpleNamespace(method=method) if method else None,
            kv_transfer_config=None,
            parallel_config=parallel,
            cache_config=SimpleNamespace(enable_prefix_caching=True, calculate_kv_scales=False),
        )

    @pytest.mark.parametrize("method", [None, "mtp"])
    def test_the_models_own_layers_draft_beside_a_pool(self, method: str | None) -> None:
        check_engine(MoetConfig(), self.engine(method), False, torch.device("cpu"))

    @pytest.mark.parametrize("method", ["draft_model", "eagle3"])
    def test_another_model_does_not(self, method: str) -> None:
        with pytest.raises(ConfigError, match=f"speculative decoding by {method}.*own MTP layers"):
            check_engine(MoetConfig(), self.engine(method), False, torch.device("cpu"))

    def test_data_parallel_engines_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"2 data-parallel engines.*one server for each"):
            check_engine(MoetConfig(), self.engine(None, 2), False, torch.device("cpu"))

    def test_auto_needs_a_gpu(self) -> None:
        auto, engine = MoetConfig(pool="auto"), self.engine(None)
        check_engine(auto, engine, False, torch.device("cuda"))
        with pytest.raises(ConfigError, match=r"pool=auto on a CPU.*size in GiB"):
            check_engine(auto, engine, False, torch.device("cpu"))
