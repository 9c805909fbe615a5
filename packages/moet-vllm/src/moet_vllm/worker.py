"""vLLM's worker, which may have a pool of experts: it wraps the forward pass of each step.

Given to vLLM as `--worker-cls moet_vllm.worker.MoetWorker`.
"""

import dataclasses
import time
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed
import vllm
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from moet_core.errors import ConfigError
from moet_core.gate import Gate, GateChange, changed, options
from moet_core.residency import Key
from moet_vllm.config import MoetConfig, parse_config
from moet_vllm.pool_engine import check_engine, rank_of
from moet_vllm.pool_memory import (
    add_to_weights,
    kv_cache_bytes,
    profiling_first,
    room_for_pool,
)
from moet_vllm.refusals import check_version
from moet_vllm.report import report_no_layers
from moet_vllm.residency import op
from moet_vllm.residency.build import ResidencyBuild, building
from moet_vllm.residency.heat import load_hot_keys, save_hot_keys
from moet_vllm.residency.resident import ResidentExperts
from moet_vllm.residency.sampled import SampledRows
from moet_vllm.residency.telemetry import Telemetry
from moet_vllm.residency.token_routing import TokenRouting, token_tables
from moet_vllm.routed_experts import MoetRoutedExperts, configured

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker

__all__ = ["MoetOutput", "MoetWorker", "wrap_forward"]

logger = init_logger("vllm.moet")

FLAG_TAG = 77
"""Tag of the one number that a pipeline stage sends the next beside its activations."""


@dataclasses.dataclass
class MoetOutput(ModelRunnerOutput):
    """The output of a step that failed or lacked experts; `MoetScheduler` reads what is added.

    Attributes:
        failure: Why the step has no result; empty if it has one.
        lacking: Experts that the result lacks.
    """

    failure: str = ""
    lacking: int = 0


class MoetWorker(StockWorker):
    """Worker of one rank; without a pool in the config it does what vLLM's own does."""

    resident: ResidentExperts | None = None
    telemetry: Telemetry | None = None
    phases: dict[str, float]
    _build: ResidencyBuild | None = None
    _failure = ""
    _lacking = 0
    _has_pool = False
    _flag_sends: list[Any]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then open its pool of experts, if it has one, and preload it."""
        config = configured(self.vllm_config)
        if config is None or not config.is_resident:
            super().load_model(*args, **kwargs)
            if config is not None:
                self._report_if_dense(config)
            return
        check_version(vllm.__version__)
        check_engine(config, self.vllm_config, self.use_v2_model_runner, self.device)
        self._flag_sends = []
        self._has_pool = True
        with building(ResidencyBuild(config, rank_of(self.vllm_config, self.device))) as build:
            super().load_model(*args, **kwargs)
        self._open_pool(build)
        self._report_if_dense(config)
        if self.resident is not None:
            wrap_forward(self.model_runner, self)

    def determine_available_memory(self) -> int:
        """Measure with the memory that streamed steps take; with `pool=auto`, size the pool."""
        resident = self.resident
        if resident is None or torch.device(self.device).type == "cpu":
            return int(super().determine_available_memory())
        assert self._build is not None
        if self._build.config.pool != "auto":
            with resident.measuring():
                return int(super().determine_available_memory())
        kv_cache = kv_cache_bytes(self)
        with resident.measuring(), profiling_first(self.cache_config):
            available = super().determine_available_memory()
        before = resident.device_bytes
        left = room_for_pool(resident, available, kv_cache, self._build.rank.agree)
        add_to_weights(self.model_runner, resident.device_bytes - before)
        self._fill_pool(self._build.config)
        return self.cache_config.kv_cache_memory_bytes or left

    def reopen_pool(self, settings: dict[str, Any]) -> None:
        """Replace the pool, between steps, by one with other settings; for measurements.

        Args:
            settings: The `moet` object of the additional config; packs must be complete.

        Raises:
            ConfigError: Settings that do not fit, or that need the checkpoint once more.
        """
        assert self._build is not None
        if not self.model_config.enforce_eager:
            raise ConfigError(
                "A pool cannot be replaced under CUDA graphs, which keep its memory's addresses; "
                "start with --enforce-eager, or restart the server."
            )
        config = parse_config(settings)
        check_engine(config, self.vllm_config, self.use_v2_model_runner, self.device)
        if config.pool == "auto":
            raise ConfigError(
                "pool=auto is what a device has left when the engine starts; give a pool that is "
                "opened again its size in GiB."
            )
        if self.resident is not None:
            self._close_pool()
        self._open_pool(self._build.again(config))

    def gate_settings(self) -> dict[str, Any] | None:
        """Return how this rank's gate is set, by option; None if it has no gate."""
        gate = self._gate()
        return None if gate is None else options(gate.settings)

    def change_gate(self, change: dict[str, Any]) -> dict[str, Any] | None:
        """Set this rank's gate anew; return how it is set now.

        vLLM sends all ranks the same calls in the same order, so that between two steps either
        all of them change or none.

        Args:
            change: Fields of `moet_core.gate.GateChange`.

        Raises:
            ConfigError: A value that the gate cannot take.
        """
        gate = self._gate()
        if gate is None:
            return None
        gate.settings = changed(gate.settings, msgspec.convert(change, GateChange))
        assert self.telemetry is not None
        self.telemetry.publish()
        logger.info(
            "moet: the gate has tau=%g and gate_budget=%d from now on",
            gate.settings.tau,
            gate.settings.budget,
        )
        return options(gate.settings)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step; a failure travels with it to the last pipeline stage."""
        self._failure, self._lacking = "", 0
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens and self._has_pool:
            self._note_outcome()
        return self._mark(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample; the output says if the step failed or lacked experts."""
        return self._mark(super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        """Keep the heat for the next start, then stop."""
        if self.resident is not None:
            save_hot_keys(self.resident)
            self._close_pool()
        super().shutdown()

    def _open_pool(self, build: ResidencyBuild) -> None:
        self._build = build
        self.resident = build.finish()
        if self.resident is None:
            return
        add_to_weights(self.model_runner, self.resident.device_bytes)
        self.telemetry = Telemetry(self.resident, self.rank, build.config.report_seconds)
        if build.config.pool != "auto":
            self._fill_pool(build.config)

    def _close_pool(self) -> None:
        assert self.resident is not None
        op.unbind(self.resident)
        add_to_weights(self.model_runner, -self.resident.device_bytes)
        self.resident.close()
        self.resident = None

    def _gate(self) -> Gate | None:
        if self.resident is None or self.resident.fine is None:
            return None
        return self.resident.fine.gate

    def _report_if_dense(self, config: MoetConfig) -> None:
        """Say so if no layer of this rank has routed experts; those that have speak for it."""
        modules = self.model_runner.get_model().modules()
        if not any(isinstance(module, MoetRoutedExperts) for module in modules):
            report_no_layers(
                rank=self.rank,
                world=self.parallel_config.world_size,
                tp_rank=get_tp_group().rank_in_group,
                codec=config.experts,
            )

    def _fill_pool(self, config: MoetConfig) -> None:
        """Bring what the pool begins with, and say what it is."""
        resident = self.resident
        assert resident is not None
        keys, shape = load_hot_keys(resident), resident.shape
        every = [(layer, expert) for layer in shape.layers for expert in range(shape.experts)]
        if shape.slots == shape.all_experts:
            keys = every
        started = time.perf_counter()
        resident.preload(keys)
        if config.fine == "all" and config.gate == "off":
            resident.tiers[1].preload(every)
        assert self._build is not None
        self.phases = {
            "packs written": self._build.write_seconds,
            "packs opened": self._build.open_seconds,
            "experts preloaded": time.perf_counter() - started,
        }
        logger.info(
            "moet: %d experts are in the pool before the first step; %s",
            resident.policy.resident,
            ", ".join(f"{what} in {seconds:.2f} s" for what, seconds in self.phases.items()),
        )
        assert self.telemetry is not None
        self.telemetry.started()

    def _note_outcome(self) -> None:
        if self.resident is not None:
            if self.resident.failure is not None:
                self._failure = str(self.resident.failure)
                logger.error("moet: a step has no result. %s", self._failure)
            self._lacking = self.resident.lacking
            assert self.telemetry is not None
            self.telemetry.step_ended()
        group = get_pp_group()
        if group.world_size == 1:
            return
        flags = torch.tensor([bool(self._failure), self._lacking], dtype=torch.int64)
        if not group.is_first_rank:
            before = torch.zeros(2, dtype=torch.int64)
            source = group.ranks[group.rank_in_group - 1]
            torch.distributed.recv(before, source, group=group.cpu_group, tag=FLAG_TAG)
            if before[0]:
                self._failure = (
                    self._failure or "An earlier pipeline stage could not read an expert."
                )
            self._lacking += int(before[1])
            flags += before
        if not group.is_last_rank:
            for _, work in self._flag_sends:
                work.wait()
            target = group.ranks[group.rank_in_group + 1]
            work = torch.distributed.isend(flags, target, group=group.cpu_group, tag=FLAG_TAG)
            self._flag_sends = [(flags, work)]

    def _mark(self, output: Any) -> Any:
        if not self._failure and not self._lacking:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _MarkedLater(output, self._failure, self._lacking)
        if isinstance(output, ModelRunnerOutput):
            return _marked(output, self._failure, self._lacking)
        return output


class _MarkedLater(AsyncModelRunnerOutput):
    """An output that is marked once it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, failure: str, lacking: int) -> None:
        self._output = output
        self._failure = failure
        self._lacking = lacking

    def get_output(self) -> ModelRunnerOutput:
        return _marked(self._output.get_output(), self._failure, self._lacking)


def _marked(output: ModelRunnerOutput, failure: str, lacking: int) -> MoetOutput:
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(ModelRunnerOutput)}
    return MoetOutput(**fields, failure=failure, lacking=lacking)


def wrap_forward(runner: Any, worker: MoetWorker) -> None:
    """Let a model runner run its passes through the worker's pool.

    `_model_forward` is vLLM's documented place for this; it runs inside the step's forward
    context, so that calling it again runs the same step.
    """
    forward = runner._model_forward
    sampled = SampledRows(runner)
    assert worker.resident is not None
    layers = worker.resident.shape.layers
    routing = TokenRouting(token_tables(runner.get_model(), layers, extract_layer_index))

    def model_forward(
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        resident = worker.resident
        if resident is None:
            raise RuntimeError("The pool of experts is closed; a step cannot run.")
        # Layers add to these in place; a second pass must begin where the first one did.
        inputs = list(intermediate_tensors.tensors.values()) if intermediate_tensors else []
        inputs += [] if inputs_embeds is None else [inputs_embeds]
        saved = [tensor.clone() for tensor in inputs]

        context = get_forward_context()
        graphs = context.cudagraph_runtime_mode

        def run() -> Any:
            # Streaming decides on the host what each layer runs; no graph holds that.
            streams = resident.is_streaming
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE if streams else graphs
            return forward(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=intermediate_tensors,
                inputs_embeds=inputs_embeds,
                **model_kwargs,
            )

        def restore() -> None:
            for tensor, copy in zip(inputs, saved, strict=True):
                tensor.copy_(copy)

        batch = runner.input_batch
        tokens = int(runner.query_start_loc.np[batch.num_reqs])

        def certain() -> list[Key]:
            return routing.keys(input_ids[:tokens].cpu().numpy()) if input_ids is not None else []

        fine = resident.fine
        gate = fine.gate if fine is not None else None
        return resident.step(
            run,
            tokens,
            restore,
            prompt=reads_prompts(runner),
            read=None if gate is None else partial(sampled.read, gate.settings.signal),
            certain=certain if routing else None,
        )

    runner._model_forward = model_forward


def reads_prompts(runner: Any) -> bool:
    """Tell whether a step computes tokens of a prompt, beside those of decoding or alone."""
    batch = runner.input_batch
    count = batch.num_reqs
    return bool((batch.num_computed_tokens_cpu[:count] < batch.num_prompt_tokens[:count]).any())
