"""vLLM's scheduler, which ends the requests of a step that has no result.

Given to vLLM as `--scheduler-cls moet_vllm.scheduler.make_scheduler`. A step whose
experts could not be read still comes back with sampled tokens, so that every process stays in
step with the others; here those tokens are dropped and all running requests end with an error:
those of the step, and those that were scheduled since and may have found its blocks in the prefix
cache. The whole prefix cache is dropped with them, since blocks of aborted and preempted requests
cannot be told apart any more.
"""

import dataclasses
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from moet_vllm.suspension import make_suspension

__all__ = ["make_scheduler"]

logger = init_logger("vllm.moet")

Outputs = dict[int, EngineCoreOutputs]


def make_scheduler(vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would have made, extended."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (MoetAsyncScheduler if is_async else MoetScheduler)(vllm_config, *args, **kwargs)


class _Outcomes(Scheduler):
    """Acts on what `MoetOutput` says of a step, and suspends drafts if that is wanted."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._suspension = make_suspension(vllm_config)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        if self._suspension is not None:
            self._suspension.scheduled(scheduler_output)
            if self._suspension.drops:
                # Where steps are scheduled ahead, the next one has places for drafts by now.
                for request_id in scheduler_output.num_scheduled_tokens:
                    self.requests[request_id].spec_token_ids = []

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self._suspension is None or not self._suspension.drops:
            super().update_draft_token_ids(draft_token_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Outputs:
        if self._suspension is not None:
            self._suspension.ended(scheduler_output, model_runner_output)
        failure = getattr(model_runner_output, "failure", "")
        lacking = getattr(model_runner_output, "lacking", 0)
        if failure:
            return self._fail(scheduler_output, model_runner_output, failure)
        if lacking:
            for request_id in scheduler_output.num_scheduled_tokens:
                self._degraded[request_id] = self._degraded.get(request_id, 0) + 1
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._degraded:
            self._label(outputs)
        return outputs

    @property
    def _degraded(self) -> dict[str, int]:
        """Steps that lacked experts, by request."""
        return self.__dict__.setdefault("_moet_degraded", {})

    def _label(self, outputs: Outputs) -> None:
        """Tell the client of a finished request how many of its steps lacked experts."""
        for batch in outputs.values():
            for output in batch.outputs:
                if output.finish_reason is not None:
                    steps = self._degraded.pop(output.request_id, 0)
                    if steps:
                        label = {"degraded": True, "degraded_steps": steps}
                        output.kv_transfer_params = {
                            **(output.kv_transfer_params or {}),
                            "moet": label,
                        }
        for request_id in [r for r in self._degraded if r not in self.requests]:
            del self._degraded[request_id]

    def _fail(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, failure: str
    ) -> Outputs:
        nothing = dataclasses.replace(
            output,
            sampled_token_ids=[[] for _ in output.req_ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
        )
        outputs = super().update_from_output(scheduler_output, nothing)
        requests = list(self.running)
        self.kv_cache_manager.evict_blocks(set(range(self.kv_cache_config.num_blocks)))
        logger.error("moet: %d requests end with an error. %s", len(requests), failure)
        self.finish_requests(
            [request.request_id for request in requests], RequestStatus.FINISHED_ERROR
        )
        for request in requests:
            self._degraded.pop(request.request_id, None)
            batch = outputs.setdefault(request.client_index, EngineCoreOutputs())
            batch.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=failure,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        return outputs


class MoetScheduler(_Outcomes):
    """For steps that run one after the other."""


class MoetAsyncScheduler(_Outcomes, AsyncScheduler):
    """For steps that are scheduled before the last one's result is known."""
