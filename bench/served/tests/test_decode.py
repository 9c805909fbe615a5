"""What counts as a timed decode step: those in which every request still gets a token."""

import sys
from types import SimpleNamespace

import pytest
from served import tasks

TOKENS = 20


class FakeEngine:
    """Answers in steps; each request begins `late` steps after the one before it."""

    def __init__(self, late):
        self.late = late
        self.names = []
        self.steps = 0

    def add_request(self, name, prompt, sampling):
        self.names.append(name)

    def produced(self, number):
        return min(TOKENS, max(0, self.steps - self.late * number))

    def has_unfinished_requests(self):
        return self.produced(len(self.names) - 1) < TOKENS

    def step(self):
        before = [self.produced(number) for number in range(len(self.names))]
        self.steps += 1
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[SimpleNamespace(token_ids=range(self.produced(number)))],
                finished=self.produced(number) == TOKENS,
            )
            for number, name in enumerate(self.names)
            if self.produced(number) > before[number]
        ]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_steps_are_timed_while_all_requests_run(monkeypatch, late):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    engine = FakeEngine(late)
    llm = SimpleNamespace(
        llm_engine=engine,
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
        collective_rpc=lambda task: [{"steps": engine.steps}],
    )
    found = tasks.decode(llm, streams=3, prompt=4, tokens=TOKENS)
    whole = TOKENS - tasks.WARM - 2 * late  # from the last one's WARM tokens to the first one's end
    assert len(found["ms"]) == whole - 1, found
    assert found["counts"]["steps"] == TOKENS - tasks.WARM
