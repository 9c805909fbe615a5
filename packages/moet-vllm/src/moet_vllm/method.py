"""vLLM's expert method for rows of a codec: no checkpoint weights are ever allocated."""

import time
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform

from moet_core.errors import ConfigError
from moet_core.row import row_layout
from moet_kernels.experts import experts
from moet_vllm import report
from moet_vllm.config import SCHEDULER, WORKER, MoetConfig
from moet_vllm.formats import ExpertFormat, fp4_codec
from moet_vllm.residency.build import current_build
from moet_vllm.residency.op import resident_experts
from moet_vllm.staging import ExpertStaging, PoolRows, RowTarget

__all__ = ["MoetExpertsMethod"]

NEEDED_FLAGS = f"--worker-cls {WORKER} --scheduler-cls {SCHEDULER}"


class MoetExpertsMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer from a pool of rows.

    The checkpoint's parameter names exist as empty parameters, so that every model's own
    `load_weights` finds them; what is loaded into them goes to the staging area, which turns each
    expert into its row as soon as the expert's last tensor has arrived.

    Args:
        moe: vLLM's settings of the layer.
        config: The plugin's settings.
        source: How the checkpoint stores the experts.
        dummy: Whether there is no checkpoint (`--load-format dummy`).
        drafter_codec: Codec of a drafter's experts, None in the main stack. A drafter's layer has
            a pool of its own, whatever `config` says, and is not part of the `converted` event.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        config: MoetConfig,
        source: ExpertFormat,
        dummy: bool,
        *,
        drafter_codec: str | None = None,
    ) -> None:
        super().__init__(moe)
        self.config = config
        chosen = fp4_codec(source) if config.experts == "fp4" else config.experts
        self.codec = drafter_codec or chosen
        self.is_drafter = drafter_codec is not None
        self.is_resident = config.is_resident and not self.is_drafter
        self.source = source
        self.dummy = dummy
        self.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG

    @property
    def is_monolithic(self) -> bool:
        """Whether routing happens in here: on the CPU, as in vLLM's own CPU method.

        vLLM's routers need a GPU or a C++ compiler at run time.
        """
        return current_platform.is_cpu()

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """Return the unquantised config: activations enter and leave in the model's dtype."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Return None: there is no expert parallelism to prepare for."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make room for the layer's rows: a pool of its own, or the rank's if there is one."""
        layout = row_layout(self.codec, hidden_size, intermediate_size_per_partition)
        self.layout = layout
        target = self._target(layer, num_experts)
        for matrix in ("w13", "w2"):
            for suffix in (*self.source.needed, *self.source.ignored):
                stub = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                stub.weight_loader = extra_weight_attrs["weight_loader"]
                layer.register_parameter(f"{matrix}_{suffix}", stub)
        parallel = self.moe.moe_parallel_config
        self.staging = ExpertStaging(
            layer.layer_name,
            self.source,
            layout,
            target,
            zeros=self.config.zeros,
            tp_rank=parallel.tp_rank,
            tp_size=parallel.tp_size,
        )
        self.started = time.perf_counter()
        if not self.is_drafter:
            report.expect_layer(layer.layer_name)

    def _target(self, layer: Any, experts_: int) -> RowTarget:
        if self.is_resident:
            build = current_build()
            if build is None:
                raise ConfigError(
                    "A pool of experts (pool, packs) needs moet's worker and scheduler. Start with "
                    f"`moet serve`, or add {NEEDED_FLAGS} to vLLM's arguments."
                )
            layout, fine = self.layout, None
            if self.config.fine is not None:
                fine = row_layout(fp4_codec(self.source), layout.hidden, layout.intermediate)
            index = extract_layer_index(layer.layer_name)
            return build.add_layer(layer.layer_name, index, layout, experts_, layer.top_k, fine)
        pool = torch.empty(experts_, self.layout.row_bytes, dtype=torch.uint8)
        layer.register_buffer("moet_pool", pool, persistent=False)
        slots = torch.arange(experts_, dtype=torch.int32)
        layer.register_buffer("moet_slot_of", slots, persistent=False)
        return PoolRows(pool)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every expert arrived; the last layer reports what was converted."""
        if self.dummy:
            self.staging.fill_random()
        conversion = self.staging.finish()
        if self.is_drafter:
            return
        world = get_world_group()
        report.finish_layer(
            layer.layer_name,
            conversion,
            rank=world.rank,
            world=world.world_size,
            tp_rank=self.moe.moe_parallel_config.tp_rank,
            seconds=time.perf_counter() - self.started,
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the routed experts.

        Args:
            layer: the RoutedExperts layer.
            x: `[tokens, hidden]`.
            topk_weights: `[tokens, top_k]` float32.
            topk_ids: `[tokens, top_k]` integers.
            shared_experts: run by the caller, unused here.
            shared_experts_input: unused here.

        Returns:
            `[tokens, hidden]` in the dtype of `x`, this tensor-parallel rank's partial sum.
        """
        if self.is_resident:
            limit = layer.swiglu_limit or 0.0
            return resident_experts(x, topk_weights, topk_ids, layer.layer_name, limit)
        return experts(
            x,
            topk_weights,
            topk_ids,
            layer.moet_pool,
            layer.moet_slot_of,
            hidden=self.layout.hidden,
            intermediate=self.layout.intermediate,
            codec=self.codec,
            swiglu_limit=layer.swiglu_limit,
        )

    def apply_monolithic(
        self,
        layer: Any,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Route with vLLM's own CPU routing, then run the routed experts."""
        topk_weights, topk_ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return self.apply(layer, x, topk_weights, topk_ids, None, None)
