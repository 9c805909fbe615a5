import json
import os
import subprocess
import sys

import pytest


class TestFake:
    def test_shows_answers_speed_and_what_became_w2(self, moet):
        done = moet("demo")
        assert done.code == 0
        assert "completion of 'import os" in done.out
        assert done.out.count("48 tokens, ") == 1
        assert "assistant: words" in done.out
        assert "│ 2,654,784 -> 1,327,104 │" in done.out
        assert "│ 4.50 -> 2.25 " in done.out
        assert "2.00 x" in done.out
        assert moet.all_gone(1)

    def test_json_is_one_object(self, moet):
        (found,) = moet("demo", "--json").objects()
        assert found["completion"]["text"] == "ab" * 48
        assert found["chat"]["answer"] == "words"
        assert found["converted"][0]["tensors"] == 144

    def test_hands_the_result_of_the_tool_back(self, moet):
        (found,) = moet("demo", "--json").objects()
        assert found["tool_call"] == {
            "request": "Show the price of UX570 over 30 days.",
            "name": "get_stock",
            "arguments": '{"symbol": "UX570"}',
            "result": '{"price": 41.5}',
            "reply": "words",
        }

    def test_a_tool_that_is_not_called_is_an_error(self, moet):
        done = moet("demo", mode="no-call")
        assert done.code == 1
        assert "it made 0 calls and said 'words'" in done.err
        assert moet.all_gone(1)

    def test_keep_serves_until_it_is_stopped(self, moet):
        process = moet.start("demo", "--json", "--keep")
        found = json.loads(process.stdout.readline())
        assert found["event"] == "demo"
        process.terminate()
        done = moet.finish(process)
        assert done.code == 143
        assert "until Ctrl-C" in done.err
        assert moet.all_gone(1)

    def test_a_death_between_the_questions_is_no_hang(self, moet):
        done = moet("demo", mode="dies-later")
        assert done.code == 1
        assert "was killed by SIGKILL" in done.err
        assert moet.all_gone(1)


@pytest.mark.engine
def test_demo_of_the_real_engine(tmp_path):
    folders = {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "moet_cli", "demo", "--json"]
    done = subprocess.run(
        command, env=os.environ | folders, capture_output=True, text=True, check=False, timeout=540
    )
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert found["completion"]["completion_tokens"] == 48
    assert found["completion"]["tokens_per_second"] > 1
    assert found["chat"]["answer"] == "The locker number of blue-owl is 90210."
    call = found["tool_call"]
    arguments = json.loads(call["arguments"])
    assert (call["name"], arguments) == ("get_stock", {"symbol": "UX570", "days": 30})
    assert call["reply"] == "The price is 41.5."
    (converted,) = found["converted"]
    assert converted["layers"] == 8
    assert converted["experts"] == 8 * 64
    assert converted["tensors"] == 8 * 64 * 3
    assert converted["bits_per_weight"] == 2.25
    assert converted["bytes_before"] > 1.9 * converted["bytes_after"]
