"""Stands before the real moet_vllm: only the server and the synthetic model are replaced."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
VLLM_VERSION = "0.24.0"
