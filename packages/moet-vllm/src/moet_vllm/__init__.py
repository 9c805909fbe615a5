"""The moet plugin for unmodified vLLM 0.24.0.

Importing this package imports neither vLLM nor torch; the plugin's entry point is
`moet_vllm.plugin:register`, the server's is `python -m moet_vllm.server`.
"""

__version__ = "0.1.0"
VLLM_VERSION = "0.24.0"

__all__ = ["VLLM_VERSION", "__version__"]
