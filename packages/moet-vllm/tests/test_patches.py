"""A patch fits one source only, and is applied where it is needed, once."""

import hashlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils import cpu_triton_utils

from moet_core.errors import ConfigError
from moet_vllm.patches import (
    PATCHES,
    Patch,
    apply_patches,
    check_target,
    cpu_recovered_tokens,
    find_target,
)
from moet_vllm.patches import patch as mechanism

CPU_ONLY = pytest.mark.skipif(
    not cpu_recovered_tokens.current_platform.is_cpu(), reason="vLLM's CPU build is not installed"
)
SPECULATIVE = SimpleNamespace(
    speculative_config=object(), model_config=SimpleNamespace(use_fp64_gumbel=False)
)
PLAIN = SimpleNamespace(speculative_config=None)


def faulty() -> str:
    return "the fault"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was applied before, and put the sampler back afterwards."""
    monkeypatch.setattr(mechanism, "_applied", set())
    kernel = cpu_triton_utils.sample_recovered_tokens_kernel
    monkeypatch.setattr(kernel, "func", kernel.func)


def make(calls: list[Any], **changed: Any) -> Patch:
    settings: dict[str, Any] = {
        "name": "mend",
        "target": f"{__name__}:faulty",
        "reason": "it is faulty",
        "upstream": "https://example.org/1",
        "sha256": hashlib.sha256(inspect.getsource(faulty).encode()).hexdigest(),
        "applies": lambda config: True,
        "apply": calls.append,
        **changed,
    }
    return Patch(**settings)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this file be imported by its name."""
    monkeypatch.setitem(sys.modules, __name__, inspect.getmodule(faulty))


@pytest.mark.usefixtures("module")
class TestMechanism:
    def test_it_is_applied_once(self) -> None:
        calls: list[Any] = []
        patch = make(calls)
        apply_patches([patch], PLAIN)
        apply_patches([patch], PLAIN)
        assert calls == [PLAIN]

    def test_it_is_not_applied_where_it_is_not_needed(self) -> None:
        calls: list[Any] = []
        # A wrong digest: a source that nobody replaces is nobody's business.
        patch = make(calls, applies=lambda config: config is SPECULATIVE, sha256="0")
        apply_patches([patch], PLAIN)
        assert calls == []

    def test_another_source_is_refused_with_file_and_both_digests(self) -> None:
        calls: list[Any] = []
        patch = make(calls, sha256="0" * 64)
        found = find_target(patch)
        with pytest.raises(ConfigError) as caught:
            apply_patches([patch], PLAIN)
        assert calls == []
        for part in ("mend", __file__, "0" * 64, found.sha256, patch.upstream, "it is faulty"):
            assert part in str(caught.value), f"wanted {part} in {caught.value}"

    @pytest.mark.parametrize("target", ["{here}:absent", "no_such_module_here:faulty"])
    def test_a_source_that_is_not_there_is_refused(self, target: str) -> None:
        patch = make([], target=target.format(here=__name__))
        with pytest.raises(ConfigError, match="that is not there"):
            check_target(patch)

    def test_a_patch_that_refused_is_not_taken_for_applied(self) -> None:
        def refuse(config: Any) -> None:
            raise ConfigError("no")

        calls: list[Any] = []
        with pytest.raises(ConfigError):
            apply_patches([make(calls, apply=refuse)], PLAIN)
        apply_patches([make(calls)], PLAIN)
        assert calls == [PLAIN]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_every_patch_fits_the_installed_vllm(patch: Patch) -> None:
    check_target(patch)


def test_names_are_unique() -> None:
    names = [patch.name for patch in PATCHES]
    assert len(names) == len(set(names)), names


class TestCpuRecoveredTokens:
    PATCH = cpu_recovered_tokens.PATCH

    @pytest.mark.parametrize(
        ("cpu", "triton", "config", "wanted"),
        [
            (True, False, SPECULATIVE, True),
            (True, False, PLAIN, False),
            (False, False, SPECULATIVE, False),
            (True, True, SPECULATIVE, False),
        ],
    )
    def test_it_applies_to_speculation_on_cpus_without_triton(
        self, monkeypatch: pytest.MonkeyPatch, cpu: bool, triton: bool, config: Any, wanted: bool
    ) -> None:
        platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setattr(cpu_recovered_tokens, "current_platform", platform)
        monkeypatch.setattr(cpu_recovered_tokens, "HAS_TRITON", triton)
        assert self.PATCH.applies(config) is wanted

    def test_float64_noise_is_refused(self) -> None:
        exact = SimpleNamespace(model_config=SimpleNamespace(use_fp64_gumbel=True))
        with pytest.raises(ConfigError, match="--use-fp64-gumbel"):
            self.PATCH.apply(exact)

    @CPU_ONLY
    @pytest.mark.parametrize("has_draft_probs", [False, True])
    def test_it_samples_what_the_formula_says(self, has_draft_probs: bool) -> None:
        cpu_recovered_tokens.current_platform.import_kernels()
        self.PATCH.apply(SPECULATIVE)
        generator = torch.Generator().manual_seed(0)
        counts, vocabulary = [2, 0, 3], 50
        total = sum(counts)
        target = torch.rand(total, vocabulary, generator=generator).softmax(-1)
        drafts = torch.randint(vocabulary, (total,), dtype=torch.int32, generator=generator)
        probs = torch.rand(total, vocabulary, generator=generator).softmax(-1)
        noise = torch.rand(len(counts), vocabulary, generator=generator) + 0.1
        got = torch.full_like(drafts, -1)
        cpu_triton_utils.sample_recovered_tokens_kernel[(len(counts), max(counts))](
            got,
            torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
            drafts,
            probs if has_draft_probs else None,
            target,
            noise,
            vocabulary,
            8192,
            NO_DRAFT_PROBS=not has_draft_probs,
            USE_FP64_GUMBEL=False,
        )
        # Leviathan et al. 2023: what is left of the target where the draft was refused.
        left = target.clone()
        left[torch.arange(total), drafts.long()] = 0
        if has_draft_probs:
            left = (target - probs).clamp(min=0)
        wanted = (left * noise.repeat_interleave(torch.tensor(counts), 0)).argmax(-1)
        assert got.tolist() == wanted.tolist()

    def test_without_it_the_argument_is_unknown(self) -> None:
        with pytest.raises(TypeError, match="USE_FP64_GUMBEL"):
            cpu_triton_utils.sample_recovered_tokens_kernel[(1, 1)](USE_FP64_GUMBEL=False)
