"""Entry point of the `vllm.general_plugins` group: vLLM calls it in each of its processes."""

import logging

__all__ = ["register"]


def register() -> None:
    """Put our RoutedExperts and heads in the place of vLLM's and name our parsers and encodings.

    Without a `moet` config and with other parsers vLLM behaves as stock.
    """
    from moet_vllm import watch

    watch.start_in_server()
    try:
        from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

        from moet_vllm.drafter_head import MoetParallelLMHead
        from moet_vllm.parsers.registration import register_encodings, register_parsers
        from moet_vllm.routed_experts import MoetRoutedExperts
    except ImportError:
        # Another vLLM release: leave it alone. `moet serve` refuses it by name before it starts.
        logging.getLogger("vllm.moet").exception(
            "moet is switched off: this vLLM lacks what moet extends (vLLM 0.24.0 is needed)"
        )
        return
    if "RoutedExperts" not in op_registry_oot:
        PluggableLayer.register_oot(MoetRoutedExperts, name="RoutedExperts")
    if "ParallelLMHead" not in op_registry_oot:
        PluggableLayer.register_oot(MoetParallelLMHead, name="ParallelLMHead")
    register_parsers()
    register_encodings()
