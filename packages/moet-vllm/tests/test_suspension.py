"""Suspension of drafts: which steps are measured, and what the scheduler is told."""

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from moet_core.drafts import FIRST_PAUSE, SETTLE, WINDOW
from moet_core.errors import ConfigError
from moet_vllm import suspension as module
from moet_vllm.suspension import DraftSuspension, make_suspension


class Server:
    """Steps of two requests, scheduled `ahead` of the one that runs; a clock that they move on."""

    def __init__(self, monkeypatch, seconds, ahead=0):
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.suspension = DraftSuspension()
        self.seconds = seconds
        self.ahead = ahead
        self.waiting = []
        self.drafted = []
        self._next = True

    def run(self, steps):
        for _ in range(steps):
            self.waiting.append(self._schedule())
            if len(self.waiting) > self.ahead:
                self._end(self.waiting.pop(0))

    def _schedule(self, **fields):
        names = ("a", "b")
        drafts = {name: [7] for name in names} if self._next else {}
        step = SimpleNamespace(
            scheduled_spec_decode_tokens=drafts,
            num_scheduled_tokens={name: 1 + len(drafts.get(name, ())) for name in names},
            scheduled_new_reqs=[],
        )
        vars(step).update(fields)
        self.suspension.scheduled(step)
        self._next = not self.suspension.drops
        return step

    def _end(self, step):
        drafted = bool(step.scheduled_spec_decode_tokens)
        self.drafted.append(drafted)
        self.now += self.seconds[drafted]
        tokens = [[1, 2], [1]] if drafted else [[1], [1]]
        self.suspension.ended(step, SimpleNamespace(sampled_token_ids=tokens))


@pytest.mark.parametrize("ahead", [0, 1])
def test_drafts_that_cost_more_than_they_bring_are_suspended(monkeypatch, ahead):
    server = Server(monkeypatch, {True: 3.0, False: 1.0}, ahead)
    before = REGISTRY.get_sample_value("moet_draft_changes_total") or 0
    server.run(FIRST_PAUSE + SETTLE + WINDOW + 4)
    assert REGISTRY.get_sample_value("moet_drafts_suspended") == 1
    assert REGISTRY.get_sample_value("moet_draft_changes_total") == before + 1
    assert server.suspension.switch.cost == pytest.approx({"drafts": 2.0, "none": 1.0})
    cost = REGISTRY.get_sample_value("moet_draft_seconds_per_token", {"way": "drafts"})
    assert cost == pytest.approx(2.0)
    assert not any(server.drafted[-4:])


def test_drafts_that_pay_are_not(monkeypatch):
    server = Server(monkeypatch, {True: 1.1, False: 1.0})
    server.run(2 * FIRST_PAUSE)
    assert REGISTRY.get_sample_value("moet_drafts_suspended") == 0
    # The drafts of the step behind a trial would have been made in its last step.
    assert server.drafted.count(False) == SETTLE + WINDOW + 1


def test_waiting_for_requests_is_no_time_of_a_step(monkeypatch):
    server = Server(monkeypatch, {True: 1.0, False: 1.0})
    for _ in range(FIRST_PAUSE + 1):
        server.run(1)
        server.now += 1000
    assert server.suspension.switch.cost["drafts"] == pytest.approx(1 / 1.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_scheduled_tokens": {"a": 2, "b": 40}},
        {"scheduled_new_reqs": ["c"]},
        {"scheduled_spec_decode_tokens": {"a": [7]}, "num_scheduled_tokens": {"a": 2, "b": 1}},
        {"num_scheduled_tokens": {}, "scheduled_spec_decode_tokens": {}},
    ],
    ids=["prompt", "new request", "one request drafts", "empty"],
)
def test_steps_that_do_not_only_decode_are_not_measured(monkeypatch, fields):
    server = Server(monkeypatch, {True: 1.0, False: 1.0})
    measured = []
    monkeypatch.setattr(server.suspension.switch, "step_ended", lambda *step: measured.append(step))
    server._end(server._schedule(**fields))
    assert measured == []
    server.run(1)
    assert len(measured) == 1


def configured(suspend, drafts):
    moet = {"pool": 0.5, "suspend_drafts": suspend}
    return SimpleNamespace(additional_config={"moet": moet}, speculative_config=drafts)


def test_it_is_made_where_it_is_wanted_and_refused_without_drafts():
    assert make_suspension(configured(False, None)) is None
    assert make_suspension(configured(True, object())) is not None
    with pytest.raises(ConfigError, match="suspend_drafts=true has no effect without drafts"):
        make_suspension(configured(True, None))
