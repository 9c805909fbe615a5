"""The route that sets the gate: what it asks of the workers, and what it refuses."""

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.utils.server_utils import AuthenticationMiddleware

from moet_core.gate import Gate, GateChange, GateSettings, changed, options
from moet_vllm.gate_control import PATH, GateControl


class Workers:
    """Gates of several ranks; None for a rank without one."""

    def __init__(self, *gates):
        self.gates = gates
        self.calls = []

    async def collective_rpc(self, method, args=()):
        self.calls.append((method, *args))
        return [None if gate is None else getattr(self, method)(gate, *args) for gate in self.gates]

    def gate_settings(self, gate):
        return options(gate.settings)

    def change_gate(self, gate, change):
        gate.settings = changed(gate.settings, msgspec.convert(change, GateChange))
        return options(gate.settings)


def serve(*gates, key=None):
    app = FastAPI()
    app.state.engine_client = Workers(*gates)
    if key:
        app.add_middleware(AuthenticationMiddleware, tokens=[key])
    app.add_middleware(GateControl)
    return TestClient(app)


def two_gates(**settings):
    return [Gate(GateSettings(tau=0.5, budget=7, **settings)) for _ in range(2)]


def test_all_ranks_get_what_is_set_and_keep_the_rest():
    gates = two_gates()
    with serve(*gates) as client:
        assert client.get(PATH).json() == {"gate": "max_prob", "tau": 0.5, "gate_budget": 7}
        answer = client.post(PATH, content='{"tau": 0.75}')
        assert (answer.status_code, answer.json()["tau"]) == (200, 0.75)
        assert client.post(PATH, content='{"gate_budget": 0}').json() == {
            "gate": "max_prob",
            "tau": 0.75,
            "gate_budget": 0,
        }
    assert [(gate.settings.tau, gate.settings.budget) for gate in gates] == [(0.75, 0)] * 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "JSON object with tau and gate_budget"),
        ('{"Tau": 0.5}', "unknown field `Tau`"),
        ('{"tau": "0.5"}', "Expected `float | null`"),
        ('{"tau": -1}', ">= 0"),
        ('{"gate_budget": 1.5}', "Expected `int | null`"),
        ('{"tau": 1.01}', "tau=1.01 is no probability"),
    ],
)
def test_what_no_gate_takes_reaches_no_worker(body, said):
    gates = two_gates()
    with serve(*gates) as client:
        answer = client.post(PATH, content=body)
        called = {method for method, *_ in client.app.state.engine_client.calls}
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert called <= {"gate_settings"}


def test_a_margin_may_be_above_one():
    with serve(*two_gates(signal="margin")) as client:
        assert client.post(PATH, content='{"tau": 3}').json()["tau"] == 3


def test_without_a_gate_there_is_nothing_to_set():
    with serve(None) as client:
        for answer in (client.get(PATH), client.post(PATH, content='{"tau": 0.5}')):
            assert answer.status_code == 404
            assert "start it with gate and tau" in answer.json()["error"]["message"]


def test_ranks_that_differ_are_reported():
    first, second = two_gates()
    second.settings = GateSettings(tau=0.9)
    with serve(first, second) as client:
        assert client.get(PATH).status_code == 500


def test_the_servers_key_guards_it():
    gates = two_gates()
    with serve(*gates, key="secret") as client:
        assert client.post(PATH, content='{"tau": 1}').status_code == 401
        assert gates[0].settings.tau == 0.5
        allowed = client.post(
            PATH, content='{"tau": 1}', headers={"Authorization": "Bearer secret"}
        )
    assert (allowed.status_code, gates[0].settings.tau) == (200, 1.0)
