import subprocess
import sys

import msgspec
import pytest

from moet_cli.options import OPTIONS, Target, convert, get_option, parse_setting
from moet_core.errors import UsageError
from moet_vllm.config import MoetConfig


class TestTable:
    def test_moet_options_are_the_plugins_settings(self):
        ours = {
            option.key: (option.type, option.default)
            for option in OPTIONS.values()
            if option.target is Target.MOET
        }
        theirs = {
            field.name: (field.type, field.default) for field in msgspec.structs.fields(MoetConfig)
        }
        assert ours == theirs

    def test_defaults_are_values_of_their_options(self):
        for option in OPTIONS.values():
            if option.default is not None:
                assert convert(option, option.default) == option.default

    @pytest.mark.engine
    def test_flags_are_flags_of_vllm(self):
        script = (
            "from vllm.entrypoints.openai.cli_args import make_arg_parser as make; "
            "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
            "print(*make(Parser())._option_string_actions)"
        )
        command = [sys.executable, "-c", script]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        known = set(found.splitlines()[-1].split())
        for option in OPTIONS.values():
            if option.target is Target.FLAG:
                assert known >= {option.key, *option.aliases}


class TestSetting:
    def test_text_becomes_the_options_type(self):
        values = [
            parse_setting(text)[1]
            for text in ("port=8001", "enforce_eager=true", "gpu_memory_utilization=0.5", "log=a=b")
        ]
        assert values == [8001, True, 0.5, "a=b"]

    def test_dashes_are_underscores(self):
        assert parse_setting("max-model-len=10")[0] is OPTIONS["max_model_len"]

    def test_unknown_key_names_the_nearest(self):
        with pytest.raises(
            UsageError, match=r"option 'max_modl_len'; did you mean 'max_model_len'"
        ):
            parse_setting("max_modl_len=10")

    def test_no_equals_sign(self):
        with pytest.raises(UsageError, match="takes key=value, got 'port'"):
            parse_setting("port")

    @pytest.mark.parametrize(
        ("setting", "reason"),
        [
            ("port=http", "Expected `int`"),
            ("port=70000", "<= 65535"),
            ("max_num_seqs=0", ">= 1"),
            ("zeros=maybe", "allowed are auto, sign, alternate"),
            ("enforce_eager=perhaps", "Expected `bool`"),
        ],
    )
    def test_a_value_the_option_does_not_take(self, setting, reason):
        with pytest.raises(UsageError, match=f"Option '{setting.split('=')[0]}' .*{reason}"):
            parse_setting(setting)

    def test_values_of_recipes_are_not_guessed_from_text(self):
        with pytest.raises(UsageError, match="Expected `int`, got `str`"):
            convert(get_option("port"), "8000")
