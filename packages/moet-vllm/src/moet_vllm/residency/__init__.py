"""The GPU as a cache of experts: slots over host memory over packs, missed steps repaired.

`stores` holds rows on the host, `pool` on the device, `resident` runs steps over both and owns
all state. None of these imports vLLM; `moet_vllm.worker` and `moet_vllm.scheduler` tie them to it.
"""
