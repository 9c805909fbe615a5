"""`moet top` against servers that show pages of metrics as vLLM and moet's workers make them."""

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet_cli import main as entry
from moet_cli import metrics, rates, top
from moet_cli.metrics import MetricsError, Page, parse_page, server_address
from moet_cli.rates import NAMES, compare
from moet_core.errors import UsageError
from moet_vllm.residency.metric_names import COUNTERS, GAUGES, STORE_COUNTERS

SMALL_MODEL = Path(__file__).parents[2] / "moet-vllm/tests/residency"

RANK = {
    "steps": 100, "repaired": 10, "streamed": 4, "failed": 1, "degraded": 2, "passes": 120,
    "wanted": 4000, "missed": 40, "brought": 60, "promoted": 20, "stall_seconds": 0.5,
    "hits": 50, "misses": 30, "bytes_read": 2**30, "io_errors": 3, "checksum_errors": 5,
    "slots": 96, "resident": 80, "coverage": 0.25, "row_bytes": 2**20,
}  # fmt: skip
"""Values of one rank, by the field behind the metric."""

LATER = {
    **RANK, "steps": 120, "repaired": 15, "streamed": 5, "passes": 145, "wanted": 5000,
    "missed": 90, "brought": 100, "promoted": 30, "stall_seconds": 0.9, "hits": 110, "misses": 50,
    "bytes_read": 2**31, "resident": 96, "failed": 2,
}  # fmt: skip
"""The same rank 20 steps later."""

VLLM = {
    "num_requests_running": 3, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.125,
    "generation_tokens_total": 1000, "prompt_tokens_total": 5000,
}  # fmt: skip


def page(ranks=(), vllm=VLLM, engines=1):
    """Return a page of metrics: of vLLM's engines, and of each rank its values by field."""
    lines = [
        "# HELP python_gc_objects_collected_total Objects collected during gc",
        "# TYPE python_gc_objects_collected_total counter",
        'python_gc_objects_collected_total{generation="0"} 1000.0',
    ]
    for name, value in vllm.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP vllm:{name} What {name} is.", f"# TYPE vllm:{name} {kind}"]
        for engine in range(engines):
            lines.append(f'vllm:{name}{{engine="{engine}",model_name="a \\"b\\""}} {value}')
    for name, (field, text) in (COUNTERS | STORE_COUNTERS | GAUGES).items():
        kind, suffix = ("gauge", "") if name in GAUGES else ("counter", "_total")
        lines += [f"# HELP {name}{suffix} {text}", f"# TYPE {name}{suffix} {kind}"]
        for rank, values in dict(ranks).items():
            if field in values:
                lines.append(f'{name}{suffix}{{rank="{rank}"}} {values[field]}')
    return "\n".join(lines) + "\n"


def look(at, *args, **kwargs):
    return parse_page(page(*args, **kwargs), at, NAMES)


class Pages:
    """A server that shows one page after the other; the last one stays."""

    def __init__(self):
        self.pages = []
        self.status = 200
        self.asked = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                owner.asked.append(self.path)
                found = owner.pages.pop(0) if len(owner.pages) > 1 else owner.pages[0]
                data = found if isinstance(found, bytes) else found.encode()
                self.send_response(owner.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def pages():
    server = Pages()
    yield server
    server.close()


@pytest.fixture
def moet_top(pages, capsys, monkeypatch):
    """Return a function that runs `moet top` on the server of `pages`, in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*args, url=None):
        code = entry.main(["top", url or pages.url, "--interval", "0.05", *args])
        return code, *capsys.readouterr()

    return run


class TestRates:
    def test_of_a_rank(self):
        found = compare(look(14.0, {0: LATER}), look(10.0, {0: RANK}))
        assert (found.seconds, found.restarted) == (4.0, False)
        (rank,) = found.ranks
        assert rank == rates.RankRates(
            rank=0,
            steps_per_second=5.0,
            repaired_share=0.25,
            streamed_share=0.05,
            passes_per_step=1.25,
            hit_rate=0.95,
            misses_per_step=2.5,
            moved_bytes_per_second=50 * 2**20 / 4,
            stall_ms_per_step=pytest.approx(20.0),
            failed_steps=2,
            degraded_steps=2,
            slots=96,
            resident=96,
            coverage=0.25,
            arena_hit_rate=0.75,
            read_bytes_per_second=2**28,
            read_errors=3,
            checksum_errors=5,
        )

    def test_of_the_server(self):
        more = VLLM | {"generation_tokens_total": 1100, "prompt_tokens_total": 5700}
        found = compare(look(14.0, vllm=more), look(10.0)).serving
        assert found == rates.ServingRates(
            running=3,
            waiting=7,
            decode_tokens_per_second=25.0,
            prompt_tokens_per_second=175.0,
            kv_cache_used=0.125,
        )

    def test_engines_add_up_and_the_fullest_cache_counts(self):
        now = look(12.0, vllm=VLLM | {"generation_tokens_total": 1100}, engines=3)
        fuller = frozenset({("engine", "9"), ("model_name", "m")})
        now.values[rates.KV_CACHE][fuller] = 0.5
        found = compare(now, look(10.0, engines=3)).serving
        assert (found.running, found.waiting) == (9, 21)
        assert found.decode_tokens_per_second == 150.0
        assert found.kv_cache_used == 0.5

    def test_an_engine_that_is_new_has_no_rate_yet(self):
        now = look(12.0, vllm=VLLM | {"generation_tokens_total": 1100}, engines=2)
        assert compare(now, look(10.0, engines=1)).serving.decode_tokens_per_second == 50.0

    def test_ranks_are_apart_and_in_order(self):
        now = look(12.0, {10: LATER, 2: RANK, 0: LATER})
        found = compare(now, look(10.0, {10: RANK, 2: RANK, 0: RANK | {"steps": 110}}))
        assert [rank.rank for rank in found.ranks] == [0, 2, 10]
        assert [rank.steps_per_second for rank in found.ranks] == [5.0, 0.0, 10.0]

    def test_one_look_shows_the_state_and_no_rates(self):
        found = compare(look(10.0, {0: RANK}), None)
        (rank,) = found.ranks
        assert (found.seconds, found.restarted) == (None, False)
        assert (rank.slots, rank.resident, rank.failed_steps) == (96, 80, 1)
        assert rank.steps_per_second is rank.hit_rate is rank.arena_hit_rate is None
        assert found.serving.running == 3
        assert found.serving.decode_tokens_per_second is None

    def test_no_steps_give_no_shares(self):
        (rank,) = compare(look(12.0, {0: RANK}), look(10.0, {0: RANK})).ranks
        assert (rank.steps_per_second, rank.moved_bytes_per_second) == (0.0, 0.0)
        assert rank.repaired_share is rank.hit_rate is rank.stall_ms_per_step is None
        assert rank.arena_hit_rate is None

    def test_a_rank_that_is_new_has_no_rates_yet(self):
        found = compare(look(12.0, {0: LATER, 1: LATER}), look(10.0, {0: RANK}))
        assert not found.restarted
        assert [rank.steps_per_second for rank in found.ranks] == [10.0, None]

    @pytest.mark.parametrize("lost", sorted(RANK))
    def test_what_a_page_lacks_is_left_out_and_nothing_else(self, lost):
        now = {field: value for field, value in LATER.items() if field != lost}
        before = {field: value for field, value in RANK.items() if field != lost}
        (whole,) = compare(look(14.0, {0: LATER}), look(10.0, {0: RANK})).ranks
        (found,) = compare(look(14.0, {0: now}), look(10.0, {0: before})).ranks
        names = [name for name in found.__struct_fields__ if getattr(found, name) is None]
        assert names == NEEDED_FOR[lost]
        for name in set(found.__struct_fields__) - set(names):
            assert getattr(found, name) == getattr(whole, name)

    @pytest.mark.parametrize("lost", sorted(VLLM))
    def test_what_vllm_lacks_is_left_out(self, lost):
        less = {name: value for name, value in VLLM.items() if name != lost}
        found = compare(look(14.0, vllm=less), look(10.0, vllm=less)).serving
        assert [getattr(found, name) is None for name in found.__struct_fields__] == [
            name == lost
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "generation_tokens_total",
                "prompt_tokens_total",
                "kv_cache_usage_perc",
            )
        ]

    @pytest.mark.parametrize("rank", ["", "zero", "-1", "٣", "1" * 10])
    def test_a_rank_without_a_number_is_an_error(self, rank):
        with pytest.raises(MetricsError, match="number of a rank"):
            compare(look(10.0, {rank: RANK}), None)


ALL_SHARES = ["repaired_share", "streamed_share", "passes_per_step"]
NEEDED_FOR = {
    "steps": ["steps_per_second", *ALL_SHARES, "misses_per_step", "stall_ms_per_step"],
    "repaired": ["repaired_share"],
    "streamed": ["streamed_share"],
    "failed": ["failed_steps"],
    "degraded": ["degraded_steps"],
    "passes": ["passes_per_step"],
    "wanted": ["hit_rate"],
    "missed": ["hit_rate", "misses_per_step"],
    "brought": ["moved_bytes_per_second"],
    "promoted": ["moved_bytes_per_second"],
    "row_bytes": ["moved_bytes_per_second"],
    "stall_seconds": ["stall_ms_per_step"],
    "hits": ["arena_hit_rate"],
    "misses": ["arena_hit_rate"],
    "bytes_read": ["read_bytes_per_second"],
    "io_errors": ["read_errors"],
    "checksum_errors": ["checksum_errors"],
    "slots": ["slots"],
    "resident": ["resident"],
    "coverage": ["coverage"],
}
"""Which figures need a value, by its field."""


class TestRestart:
    @pytest.mark.parametrize("field", [field for field, _ in (COUNTERS | STORE_COUNTERS).values()])
    def test_any_counter_that_went_back_begins_a_new_window(self, field):
        before = look(10.0, {0: RANK, 1: RANK})
        now = look(12.0, {0: LATER, 1: LATER | {field: RANK[field] * 0.9}})
        found = compare(now, before)
        assert (found.seconds, found.restarted) == (None, True)
        assert {rank.steps_per_second for rank in found.ranks} == {None}
        assert found.serving.decode_tokens_per_second is None
        assert found.ranks[0].resident == LATER["resident"]
        assert compare(now, now).restarted is False

    @pytest.mark.parametrize("name", ["generation_tokens_total", "prompt_tokens_total"])
    def test_vllm_s_counters_too(self, name):
        assert compare(look(12.0, vllm=VLLM | {name: 1}), look(10.0)).restarted

    def test_a_counter_that_is_gone_went_back(self):
        assert compare(look(12.0), look(10.0, {0: RANK})).restarted
        assert compare(look(12.0, {1: RANK}), look(10.0, {0: RANK})).restarted

    @pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc"])
    def test_gauges_may_fall(self, name):
        now = look(12.0, {0: RANK | {"resident": 1}}, VLLM | {name: 0})
        found = compare(now, look(10.0, {0: RANK}))
        assert not found.restarted


counts = st.dictionaries(st.sampled_from(sorted(RANK)), st.integers(0, 2**40)).map(
    lambda some: dict.fromkeys(RANK, 0) | some
)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.integers(0, 7), st.tuples(counts, counts), min_size=1),
    st.floats(0.001, 1000),
    st.floats(0, 1e6),
)
def test_rates_give_back_what_was_counted(ranks, seconds, start):
    """From the text of two pages to rates and, times steps and seconds, back to the counts."""
    before = {rank: values for rank, (values, _) in ranks.items()}
    now = {
        rank: {field: values[field] + rise[field] for field in values}
        for rank, (values, rise) in ranks.items()
    }
    found = compare(look(start + seconds, now), look(start, before))
    assert not found.restarted
    assert found.seconds == pytest.approx(seconds, abs=1e-9)
    assert [rank.rank for rank in found.ranks] == sorted(ranks)
    for rank in found.ranks:
        rise = ranks[rank.rank][1]
        total = now[rank.rank]
        steps = rise["steps"]
        assert rank.steps_per_second * found.seconds == pytest.approx(steps)
        assert rank.read_bytes_per_second * found.seconds == pytest.approx(rise["bytes_read"])
        assert rank.moved_bytes_per_second * found.seconds == pytest.approx(
            (rise["brought"] + rise["promoted"]) * total["row_bytes"]
        )
        shares = {
            "repaired_share": "repaired",
            "streamed_share": "streamed",
            "passes_per_step": "passes",
            "misses_per_step": "missed",
        }
        for name, field in shares.items():
            share = getattr(rank, name)
            assert (share is None) == (steps == 0)
            assert steps == 0 or share * steps == pytest.approx(rise[field])
        assert steps == 0 or rank.stall_ms_per_step * steps == pytest.approx(
            1000 * rise["stall_seconds"]
        )
        assert (rank.hit_rate is None) == (rise["wanted"] == 0)
        if rise["wanted"]:
            missed = rise["wanted"] * (1 - rank.hit_rate)
            assert missed == pytest.approx(rise["missed"], abs=1e-9 * rise["wanted"])
        looked_up = rise["hits"] + rise["misses"]
        assert (rank.arena_hit_rate is None) == (looked_up == 0)
        assert not looked_up or rank.arena_hit_rate * looked_up == pytest.approx(rise["hits"])
        assert rank.failed_steps == total["failed"]
        assert rank.checksum_errors == total["checksum_errors"]


class TestParse:
    def test_keeps_the_names_asked_for(self):
        text = page({0: RANK, 1: RANK})
        found = parse_page(text, 3.0, {"moet_row_bytes", "moet_steps_total", "vllm:absent"})
        ranks = [frozenset({("rank", number)}) for number in "01"]
        assert found == Page(
            3.0,
            {
                "moet_row_bytes": dict.fromkeys(ranks, 2.0**20),
                "moet_steps_total": dict.fromkeys(ranks, 100.0),
            },
        )

    def test_labels_are_unescaped(self):
        ((labels,),) = [look(0.0).values[rates.RUNNING]]
        assert dict(labels) == {"engine": "0", "model_name": 'a "b"'}

    @pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999", "9" * 400])
    def test_a_number_that_is_none_is_refused(self, value):
        with pytest.raises(ValueError, match=r"finite value|no metric"):
            look(0.0, {0: RANK | {"steps": value}})

    @settings(max_examples=150, deadline=None)
    @given(st.one_of(st.text(), st.text('#{}"\\=, \n\tmoet_steps_total 0123'), st.binary()))
    def test_garbage_is_refused_in_one_way(self, garbage):
        text = garbage.decode(errors="replace") if isinstance(garbage, bytes) else garbage
        with pytest.raises(ValueError, match=r"none of them|no metric"):
            parse_page(text, 0.0, NAMES)

    @settings(max_examples=100, deadline=None)
    @given(st.data())
    def test_a_torn_page_is_read_or_refused(self, data):
        text = page({0: RANK})
        start, end = sorted(data.draw(st.integers(0, len(text))) for _ in range(2))
        try:
            found = parse_page(text[:start] + text[end:], 0.0, NAMES)
        except ValueError:
            return
        values = [value for samples in found.values.values() for value in samples.values()]
        assert values
        assert all(map(math.isfinite, values))


class TestAddress:
    @pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/metrics"])
    def test_paths_that_people_copy_are_dropped(self, path):
        assert server_address(f"http://127.0.0.1:8000{path}") == "http://127.0.0.1:8000"

    def test_a_path_in_front_stays(self):
        assert server_address("https://host/models/a/v1") == "https://host/models/a"

    @pytest.mark.parametrize(
        "url",
        ["localhost:8000", "8000", "", "ftp://host", "file:///etc/passwd", "http://", "http://:80",
         "http://h:70000", "http://h:x", "http://[::1"],
    )  # fmt: skip
    def test_what_is_no_address(self, url, capsys):
        with pytest.raises(UsageError, match=re.escape("like http://127.0.0.1:8000, got ")):
            server_address(url)
        assert entry.main(["top", url]) == 2
        assert capsys.readouterr().err.count("\n") == 1


class TestOnce:
    def test_one_table(self, moet_top, pages):
        pages.pages = [page({0: RANK, 1: RANK}), page({0: LATER, 1: RANK})]
        code, out, err = moet_top("--once")
        assert (code, err) == (0, "")
        assert pages.asked == ["/metrics"] * 2
        first, second, *table = out.splitlines()
        assert re.fullmatch(re.escape(pages.url) + r", the last \d+\.\d s", first)
        assert second == (
            "3 running, 7 waiting; decode 0.0 tokens/s, prompts 0.0 tokens/s; KV cache 12.5 %"
        )
        cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in table if "│" in row]
        shown = {row[0]: row[1:] for row in cells}
        assert "rank 0" in table[1]
        assert "rank 1" in table[1]
        for label in ("steps/s", "MiB/s moved to the device", "MiB/s read from packs"):
            assert float(shown.pop(label)[0].replace(",", "")) > 0
        assert shown == {
            "steps repaired, streamed": ["25.0 %, 5.0 %", "-, -"],
            "passes a step": ["1.25", "-"],
            "hit rate": ["95.0 %", "-"],
            "misses a step": ["2.5", "-"],
            "ms stalled a step": ["20.0", "-"],
            "experts held, slots": ["96, 96", "80, 96"],
            "coverage": ["25.0 %", "25.0 %"],
            "hit rate of the arena": ["75.0 %", "-"],
            "steps failed, degraded (total)": ["2, 2", "1, 2"],
            "errors of reads, checksums (total)": ["3, 5", "3, 5"],
        }

    def test_fits_a_usual_terminal(self, moet_top, pages, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        pages.pages = [page({0: RANK, 1: RANK}), page({0: LATER, 1: RANK | {"steps": 1}})]
        _, out, _ = moet_top("--once")
        lines = out.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines[2:])) <= 80

    def test_json_is_one_object_with_every_figure(self, moet_top, pages):
        pages.pages = [page({0: RANK}), page({0: LATER}, VLLM | {"generation_tokens_total": 1500})]
        code, out, err = moet_top("--once", "--json")
        assert (code, err) == (0, "")
        (line,) = out.splitlines()
        found = json.loads(line)
        assert found["event"] == "top"
        assert found["url"] == pages.url
        assert found["restarted"] is False
        assert found["notes"] == []
        assert found["seconds"] >= 0.05
        assert found["serving"]["decode_tokens_per_second"] == pytest.approx(500 / found["seconds"])
        (rank,) = found["ranks"]
        assert set(rank) == set(rates.RankRates.__struct_fields__)
        assert rank["steps_per_second"] == pytest.approx(20 / found["seconds"])
        assert rank["failed_steps"] == 2

    def test_a_server_without_a_pool_is_shown_and_says_so(self, moet_top, pages):
        pages.pages = [page()]
        code, out, err = moet_top("--once")
        assert (code, err) == (0, "")
        assert "3 running, 7 waiting" in out
        assert out.endswith(top.NO_POOL + "\n")
        assert "PROMETHEUS_MULTIPROC_DIR" in out
        assert "│" not in out
        _, out, _ = moet_top("--once", "--json")
        assert json.loads(out)["ranks"] == []
        assert json.loads(out)["notes"] == [top.NO_POOL]

    def test_a_pool_without_vllm_s_own_metrics_is_shown(self, moet_top, pages):
        pages.pages = [page({0: RANK}, vllm={})]
        code, out, _ = moet_top("--once")
        assert code == 0
        assert (
            "- running, - waiting; decode - tokens/s, prompts - tokens/s; KV cache -"
            in out.splitlines()
        )
        assert "rank 0" in out

    def test_a_restart_between_the_looks_is_said(self, moet_top, pages):
        pages.pages = [page({0: LATER}), page({0: RANK})]
        code, out, _ = moet_top("--once")
        assert code == 0
        assert out.splitlines()[0] == f"{pages.url}, now"
        assert out.splitlines()[-1] == top.RESTARTED

    def test_the_paths_of_the_api_are_no_hindrance(self, moet_top, pages):
        pages.pages = [page()]
        assert moet_top("--once", url=pages.url + "/v1")[0] == 0
        assert set(pages.asked) == {"/metrics"}


class TestErrors:
    def check(self, result, *words):
        code, out, err = result
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        for word in words:
            assert word in err

    def test_no_server(self, moet_top, pages):
        url = pages.url
        pages.close()
        pages.close = lambda: None
        for mode in ([], ["--once"]):
            result = moet_top(*mode, url=url)
            self.check(result, f"{url}/metrics", "refused", "Start one with `moet serve`")

    def test_no_server_as_json(self, moet_top, pages):
        pages.pages = ["<html>"]
        code, out, _ = moet_top("--once", "--json")
        assert code == 1
        assert json.loads(out)["event"] == "error"

    def test_a_server_that_goes_away(self, moet_top, pages):
        pages.pages = [page({0: RANK}), ""]
        self.check(moet_top(), f"{pages.url}/metrics")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "<!DOCTYPE html>\n<html><body>hello</body></html>",
            '{"detail": "Not Found"}',
            "# HELP process_cpu Seconds.\n# TYPE process_cpu counter\nprocess_cpu_total 1.0\n",
            b"\xff\xfe\x00",
            "vllm:num_requests_running\x07\r 1",
            'vllm:num_requests_running{, ="0"} 1',
            "vllm:num_requests_running NaN\n",
        ],
    )
    def test_what_is_no_page_of_vllm(self, moet_top, pages, text):
        pages.pages = [text]
        result = moet_top("--once")
        self.check(result, f"{pages.url}/metrics", "Is this the address of a server")
        assert result[2].rstrip("\n").isprintable()

    def test_http_errors(self, moet_top, pages):
        pages.pages, pages.status = [page()], 404
        self.check(moet_top("--once"), "found HTTP 404 Not Found", pages.url)

    def test_a_page_without_end(self, moet_top, pages, monkeypatch):
        monkeypatch.setattr(metrics, "MAX_PAGE_BYTES", 1000)
        pages.pages = [page({0: RANK})]
        self.check(moet_top("--once"), "more than 1,000 bytes")

    def test_a_server_that_does_not_answer(self, moet_top, pages, monkeypatch):
        monkeypatch.setattr(metrics, "ANSWER_SECONDS", 0.1)

        class Slow(list):
            def __len__(self):
                time.sleep(0.5)
                return 1

        pages.pages = Slow([page()])
        self.check(moet_top("--once"), "timed out", pages.url)

    def test_a_proxy_is_not_asked(self, moet, pages):
        pages.pages = [page()]
        args = ("top", pages.url, "--once", "--interval", "0.05")
        done = moet(*args, http_proxy="http://127.0.0.1:9", no_proxy="")
        assert (done.code, done.err) == (0, "")

    @pytest.mark.parametrize("interval", ["0", "-1", "x"])
    def test_an_interval_that_is_none(self, moet_top, interval):
        code, out, err = moet_top("--interval", interval)
        assert (code, out) == (2, "")
        assert "--interval" in err


class TestUntilStopped:
    def steps(self, count):
        return page({0: RANK | {"steps": count}})

    def test_json_objects_follow_a_restart(self, moet, pages):
        pages.pages = [self.steps(count) for count in (100, 150, 10, 30)]
        process = moet.start("top", pages.url, "--json", "--interval", "0.1")
        found = [json.loads(process.stdout.readline()) for _ in range(4)]
        process.send_signal(signal.SIGINT)
        done = moet.finish(process)
        assert (done.code, done.err) == (0, "")
        speeds = [look["ranks"][0]["steps_per_second"] for look in found]
        assert [look["restarted"] for look in found] == [False, True, False, False]
        assert speeds[0] == pytest.approx(50 / found[0]["seconds"])
        assert speeds[1] is found[1]["seconds"] is None
        assert found[1]["notes"] == [top.RESTARTED]
        assert speeds[2] == pytest.approx(20 / found[2]["seconds"])
        assert speeds[3] == 0

    def test_tables_follow_each_other_where_there_is_no_terminal(self, moet, pages):
        pages.pages = [self.steps(100)]
        process = moet.start("top", pages.url, "--interval", "0.1")
        heads = []
        while len(heads) < 3:
            line = process.stdout.readline()
            if line.startswith(pages.url):
                heads.append(line)
        process.send_signal(signal.SIGINT)
        done = moet.finish(process)
        assert (done.code, done.err) == (0, "")
        assert all(re.search(r", the last \d+\.\d s$", head) for head in heads)
        assert "\x1b" not in done.out

    @pytest.mark.parametrize(("signum", "wanted"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
    def test_other_signals_are_no_success(self, moet, pages, signum, wanted):
        pages.pages = [self.steps(100)]
        process = moet.start("top", pages.url, "--interval", "0.1", "--json")
        process.stdout.readline()
        process.send_signal(signum)
        assert moet.finish(process).code == wanted

    def test_once_that_is_stopped_is_no_success(self, moet, pages, wait_until):
        pages.pages = [self.steps(100)]
        process = moet.start("top", pages.url, "--interval", "100", "--once")
        wait_until(lambda: pages.asked)
        process.send_signal(signal.SIGINT)
        done = moet.finish(process)
        assert (done.code, done.out) == (130, "")

    def test_a_reader_that_has_enough_ends_it_without_a_traceback(self, moet, pages):
        pages.pages = [self.steps(100)]
        process = moet.start("top", pages.url, "--interval", "0.1", "--json")
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 1
        process.stderr.close()

    def test_a_terminal_is_renewed_in_place_until_ctrl_c(self, pages):
        pages.pages = [self.steps(100), self.steps(100), self.steps(120)]
        command = [sys.executable, "-m", "moet_cli", "top", pages.url, "--interval", "0.2"]
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
        )
        os.close(theirs)
        shown = read_until(ours, lambda text: text.count("steps/s") >= 4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        os.close(ours)
        assert (process.returncode, err) == (0, b"")
        assert f"{pages.url}, now" in shown
        assert shown.count("the last ") >= 3
        assert "\x1b[1A" in shown, "the cursor goes up to renew the view"
        assert "\x1b[?25l" in shown, "the cursor is hidden"


def read_until(descriptor, holds):
    text, deadline = "", time.monotonic() + 60
    while not holds(text):
        assert time.monotonic() < deadline, f"waited in vain, got {text!r}"
        if select.select([descriptor], [], [], 0.1)[0]:
            text += os.read(descriptor, 65536).decode()
    return text


def test_help_says_what_is_shown(capsys):
    assert entry.main(["top", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("[URL]", "--interval", "--once", "--json", "http://127.0.0.1:8000", "Ctrl-C"):
        assert word in out


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return what Telemetry published of two pools, early and late."""
    folder = tmp_path_factory.mktemp("published")
    metrics_folder = folder / "metrics"
    metrics_folder.mkdir()
    variables = {
        "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder),
        "PYTHONPATH": str(SMALL_MODEL),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("publish_pools.py")), str(folder)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_telemetry_publishes_is_what_is_shown(published, moet_top, pages):
    early, late = published
    pages.pages = [early["page"], late["page"]]
    code, out, err = moet_top("--once", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["notes"] == []
    assert set(found["serving"].values()) == {None}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        before, now = (moment["counts"][rank["rank"]] for moment in (early, late))
        rise = {name: now[name] - before[name] for name in now}
        assert rise["steps"] == 12
        moved = (rise["brought"] + rise["promoted"]) * now["row_bytes"]
        assert rank["steps_per_second"] * found["seconds"] == pytest.approx(12)
        assert rank["repaired_share"] == rise["repaired"] / 12
        assert rank["streamed_share"] == rise["streamed"] / 12
        assert rank["passes_per_step"] == rise["passes"] / 12
        assert rank["hit_rate"] == pytest.approx(1 - rise["missed"] / rise["wanted"])
        assert rank["misses_per_step"] == rise["missed"] / 12
        assert rank["moved_bytes_per_second"] * found["seconds"] == pytest.approx(moved)
        assert rank["stall_ms_per_step"] == pytest.approx(1000 * rise["stall_seconds"] / 12)
        assert rank["failed_steps"] == rank["degraded_steps"] == rank["checksum_errors"] == 0
        assert rank["resident"] == late["held"][rank["rank"]]
        assert rank["slots"] == late["slots"][rank["rank"]]
    packed, pinned = found["ranks"]
    before, now = early["store"], late["store"]
    hits, misses = (now[name] - before[name] for name in ("hits", "misses"))
    assert packed["arena_hit_rate"] == pytest.approx(hits / (hits + misses))
    read = now["bytes_read"] - before["bytes_read"]
    assert read > 0
    assert packed["read_bytes_per_second"] * found["seconds"] == pytest.approx(read)
    assert packed["repaired_share"] > 0
    assert packed["streamed_share"] > 0
    assert (pinned["coverage"], pinned["arena_hit_rate"]) == (1.0, None)
    assert pinned["read_bytes_per_second"] == 0
