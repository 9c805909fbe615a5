import numpy as np
import pytest
import torch
from msgspec import structs

from moet_core.codecs import codec_names, get_codec
from moet_core.row import row_layout
from moet_core.samples import FORMATS, difficult_source, typical_source
from moet_kernels.encode import decode_rows, encode_expert_into, encode_matrix, from_numpy
from moet_kernels.experts import experts

PAIRS = [
    (codec, source_format)
    for codec in codec_names()
    for source_format in FORMATS
    if (codec, source_format) != ("fp4-nv", "mxfp4")
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def on_gpu(source):
    tensors = {
        name: value.cuda()
        for name, value in structs.asdict(from_numpy(source)).items()
        if isinstance(value, torch.Tensor)
    }
    return structs.replace(from_numpy(source), **tensors)


@pytest.mark.parametrize(("codec", "source_format"), PAIRS)
def test_encoding_on_the_gpu_equals_golden(codec, source_format):
    for seed in range(20):
        source = difficult_source(source_format, 48, 160, seed=seed)
        planes = get_codec(codec).encode(source)
        twin = encode_matrix(codec, on_gpu(source))
        assert twin.codes.is_cuda
        np.testing.assert_array_equal(twin.codes.cpu(), planes.codes)
        np.testing.assert_array_equal(twin.scales.cpu(), planes.scales)
        assert twin.tensor_scale == planes.tensor_scale


@pytest.mark.parametrize("codec", codec_names())
def test_experts_on_the_gpu_agree_with_the_cpu(codec):
    layout = row_layout(codec, 64, 96)
    pool = torch.empty(2, layout.row_bytes, dtype=torch.uint8)
    for slot in range(2):
        shapes = [(96, 64), (96, 64), (64, 96)]
        sources = [typical_source("bf16", *s, seed=3 * slot + i) for i, s in enumerate(shapes)]
        encode_expert_into(pool[slot], layout, *map(from_numpy, sources))
    gpu_pool = pool.cuda()
    for cpu, gpu in zip(
        decode_rows(pool, layout, torch.bfloat16),
        decode_rows(gpu_pool, layout, torch.bfloat16),
        strict=True,
    ):
        assert torch.equal(cpu, gpu.cpu())
    x, ids = torch.randn(5, 64), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    weights, slot_of = torch.rand(5, 2), torch.tensor([1, -1, 0], dtype=torch.int32)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for device in ("cpu", "cuda")]
    sizes = {"hidden": 64, "intermediate": 96, "codec": codec}
    expected = experts(x, weights, ids, pool, slot_of, missing=counts[0], **sizes)
    moved = (tensor.cuda() for tensor in (x, weights, ids))
    found = experts(*moved, gpu_pool, slot_of.cuda(), missing=counts[1], **sizes)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert counts[1].item() == counts[0].item() == 1
