import pytest

from moet_cli.vllm_args import parse_vllm_arguments
from moet_core.errors import UsageError


class TestKnownFlags:
    @pytest.mark.parametrize(
        "words",
        [
            ["--tensor-parallel-size", "2"],
            ["--tensor-parallel-size=2"],
            ["--tensor_parallel_size", "2"],
            ["-tp", "2"],
            ["-tp=2"],
        ],
    )
    def test_every_spelling_is_the_same_option(self, words):
        found = parse_vllm_arguments(words)
        assert found.values == {"tensor_parallel_size": 2}
        assert found.rest == ()

    def test_switches_say_yes_and_no(self):
        assert parse_vllm_arguments(["--enforce-eager"]).values == {"enforce_eager": True}
        assert parse_vllm_arguments(["--no-enforce-eager"]).values == {"enforce_eager": False}

    def test_a_missing_value(self):
        with pytest.raises(UsageError, match="--port needs a value"):
            parse_vllm_arguments(["--port"])

    def test_a_value_for_a_switch(self):
        with pytest.raises(UsageError, match="--enforce-eager takes no value, got '1'"):
            parse_vllm_arguments(["--enforce-eager=1"])

    def test_a_value_the_option_does_not_take(self):
        with pytest.raises(UsageError, match="Option 'port'"):
            parse_vllm_arguments(["--port", "http"])


class TestRest:
    def test_other_arguments_stay_as_they_are(self):
        words = ["--max_num_partial_prefills", "2", "--port", "1", "-O3", "--kv-cache-dtype=auto"]
        found = parse_vllm_arguments(words)
        assert found.rest == ("--max_num_partial_prefills", "2", "-O3", "--kv-cache-dtype=auto")
        assert found.values == {"port": 1}

    @pytest.mark.parametrize(
        "flag", ["--model", "--api-key", "--uds", "--headless", "--ssl-keyfile", "--ssl_certfile"]
    )
    def test_flags_that_moet_cannot_serve_with_are_refused(self, flag):
        with pytest.raises(UsageError, match=r"does not take --[a-z-]+ after `--`\. [A-Zm]"):
            parse_vllm_arguments([flag, "x"])


class TestAdditionalConfig:
    def test_other_plugins_keys_are_kept(self):
        found = parse_vllm_arguments(["--additional-config", '{"other": {"a": 1}}'])
        assert found.additional_config == {"other": {"a": 1}}
        assert found.rest == ()

    def test_our_key_is_refused(self):
        with pytest.raises(UsageError, match=r'must not hold "moet": .*--set'):
            parse_vllm_arguments(['--additional-config={"moet": {}}'])

    def test_dotted_keys_are_refused(self):
        with pytest.raises(UsageError, match=r"Give --additional-config.moet.experts as JSON"):
            parse_vllm_arguments(["--additional-config.moet.experts", "w2"])

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_not_a_json_object(self, text):
        with pytest.raises(UsageError, match="takes a JSON object"):
            parse_vllm_arguments(["--additional-config", text])
