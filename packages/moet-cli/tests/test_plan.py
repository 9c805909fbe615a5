import json
import sys

import pytest

from moet_cli.options import OPTIONS, Source
from moet_cli.plan import environment, resolve, server_command, server_url
from moet_core.errors import ConfigError, UsageError
from moet_vllm.config import MoetConfig


def origin(plan, name):
    return plan[name], plan.values[name].source


class TestProvenance:
    def test_every_option_has_a_value(self):
        assert resolve("demo").values.keys() == OPTIONS.keys()

    def test_the_higher_source_wins_and_the_loser_is_kept(self):
        plan = resolve("demo", ["max_model_len=100"], ["--max-model-len", "50"])
        assert origin(plan, "max_model_len") == (50, Source.VLLM_ARGUMENT)
        lost = [(value.value, value.source) for value in plan.values["max_model_len"].lost]
        assert lost == [
            (100, Source.COMMAND_LINE),
            (4096, Source.RECIPE),
            (None, Source.DEFAULT),
        ]

    def test_what_nobody_sets_is_the_default(self):
        assert origin(resolve("demo"), "host") == ("127.0.0.1", Source.DEFAULT)

    def test_the_last_setting_of_a_key_wins(self):
        assert resolve("demo", ["port=1", "port=2"])["port"] == 2

    def test_moet_settings_reach_the_plugins_config(self):
        plan = resolve("demo", ["zeros=sign"])
        assert plan.moet == MoetConfig(experts="w2", zeros="sign")

    def test_port_zero_becomes_a_free_one(self):
        plan = resolve("demo", ["port=0"])
        assert plan["port"] > 0
        assert plan.values["port"].source is Source.COMMAND_LINE


class TestTarget:
    def test_a_folder_is_a_model(self, tmp_path):
        plan = resolve(str(tmp_path))
        assert plan.recipe is None
        assert origin(plan, "model") == (str(tmp_path), Source.COMMAND_LINE)

    def test_a_hub_id_is_a_model(self):
        assert resolve("someone/some-model.v1")["model"] == "someone/some-model.v1"

    def test_a_missing_folder(self):
        with pytest.raises(UsageError, match="no model folder /no/such"):
            resolve("/no/such")

    def test_neither_recipe_nor_folder(self):
        with pytest.raises(UsageError, match=r"did you mean 'demo-gpu'\? .*A model is a folder or"):
            resolve("demo_gpu")


class TestCommand:
    def test_a_pool_brings_worker_and_scheduler(self):
        plan = resolve("demo", ["pool=0.5", "packs=/fast/packs", "arena=2"])
        assert plan.moet.store == "arena"
        command = server_command(plan, "/model")
        at = command.index("--scheduler-cls")
        assert command[at - 1 : at + 2] == (
            "moet_vllm.worker.MoetWorker",
            "--scheduler-cls",
            "moet_vllm.scheduler.make_scheduler",
        )
        config = json.loads(command[-1])["moet"]
        assert config == {"pool": 0.5, "packs": "/fast/packs", "arena": 2.0}

    def test_a_gate_brings_the_route_that_sets_it(self):
        settings = ["fine=0.5", "gate=max_prob", "tau=0.6"]
        command = server_command(resolve("demo", settings), "/model")
        at = command.index("--middleware")
        assert command[at + 1] == "moet_vllm.gate_control.GateControl"
        assert "--middleware" not in server_command(resolve("demo", settings[:1]), "/model")

    def test_vllm_alone_gets_its_own_worker(self):
        command = server_command(resolve("demo", ["experts=native"]), "/model")
        assert "--worker-cls" not in command

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            (["arena=2"], "arena has no effect beside pool=all"),
            (["pool=1", "arena=2", "host_store=pinned"], "arena has no effect beside host_store"),
            (["pool=1", "host_store=pack"], "set packs to a folder"),
            (["pool=1", "host_store=arena", "packs=/p"], "needs the size of the arena"),
            (["pack_reads=cached", "pool=1"], "pack_reads has no effect beside no packs"),
            (["suspend_drafts=true"], "suspend_drafts has no effect beside all experts in place"),
            (["miss_tolerance=2"], "miss_tolerance has no effect beside pool=all"),
            (["host_store=pinned"], "host_store=pinned has no effect beside pool=all"),
            (["experts=native", "pool=1"], "a pool or packs has no effect beside experts=native"),
        ],
    )
    def test_settings_that_would_do_nothing_are_refused(self, settings, named):
        with pytest.raises(ConfigError, match=named):
            resolve("demo", settings)

    @pytest.mark.parametrize("setting", ["pool=0", "pool=-1", "pool=some", "arena=0"])
    def test_sizes_that_are_none_are_refused(self, setting):
        with pytest.raises(UsageError, match=setting.split("=")[0]):
            resolve("demo", [setting])

    def test_flags_come_from_the_table(self):
        plan = resolve("demo", ["port=9"], ["--no-enforce-eager", "--seed", "3"])
        command = server_command(plan, "/model")
        assert command[:5] == (sys.executable, "-m", "moet_vllm.server", "serve", "/model")
        assert command[5:-2] == (
            *("--host", "127.0.0.1", "--port", "9"),
            *("--served-model-name", "moet-demo", "--dtype", "bfloat16"),
            *("--max-model-len", "4096", "--max-num-seqs", "8"),
            *("--max-num-batched-tokens", "2048", "--no-enforce-eager"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "moet_glm47"),
            *("--worker-cls", "moet_vllm.worker.MoetWorker", "--seed", "3"),
        )

    def test_drafts_become_vllms_speculative_config(self):
        command = server_command(resolve("demo", ["speculative_tokens=2"]), "/model")
        drafts = json.loads(command[command.index("--speculative-config") + 1])
        assert drafts == {"method": "mtp", "num_speculative_tokens": 2}

    def test_no_drafts_no_speculative_config(self):
        assert "--speculative-config" not in server_command(resolve("demo"), "/model")

    @pytest.mark.parametrize(
        "words", [["--speculative-config", "{}"], ["--speculative_config.method=mtp"], ["-sc={}"]]
    )
    def test_drafts_are_set_in_one_way_only(self, words):
        with pytest.raises(UsageError, match="both say what drafts; leave one out"):
            resolve("demo", ["speculative_tokens=1"], words)
        assert resolve("demo", [], words).vllm_arguments == tuple(words)

    def test_additional_config_holds_ours_and_the_users(self):
        plan = resolve("demo", [], ["--additional-config", '{"other": 1}'])
        *_, flag, config = server_command(plan, "/model")
        assert flag == "--additional-config"
        assert json.loads(config) == {"other": 1, "moet": {}}

    def test_environment_of_the_recipe_wins_over_the_users(self):
        found = environment(resolve("demo"), {"VLLM_CPU_KVCACHE_SPACE": "40"})
        assert found["VLLM_CPU_KVCACHE_SPACE"] == "1"

    def test_the_users_environment_wins_over_what_is_merely_usual(self):
        found = environment(resolve("demo"), {"VLLM_HOST_IP": "10.0.0.1"})
        assert "VLLM_HOST_IP" not in found
        assert found["VLLM_NO_USAGE_STATS"] == "1"

    def test_the_hub_is_off_only_if_nothing_can_need_it(self):
        assert environment(resolve("demo"), {})["HF_HUB_OFFLINE"] == "1"
        assert "HF_HUB_OFFLINE" not in environment(resolve("a/b"), {})
        assert "HF_HUB_OFFLINE" not in environment(resolve("demo", [], ["--x", "y"]), {})

    @pytest.mark.parametrize(
        ("host", "url"),
        [
            ("0.0.0.0", "http://127.0.0.1:7"),
            ("::", "http://[::1]:7"),
            ("10.1.1.1", "http://10.1.1.1:7"),
        ],
    )
    def test_url(self, host, url):
        assert server_url(resolve("demo", [f"host={host}", "port=7"])) == url
