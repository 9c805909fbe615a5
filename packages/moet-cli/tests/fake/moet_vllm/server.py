"""A server with the surface that moet uses, and with faults on demand.

FAKE_MODE is a comma-separated list of:
    slow            takes a second before it listens
    silent          never listens
    crash           raises instead of listening
    suicide         kills itself with SIGKILL instead of listening
    worker-dies     reports a dead worker instead of listening, then hangs
    half            reports only the first of two ranks' experts
    unconverted     reports no experts
    no-step         is healthy, but cannot compute
    no-call         never calls a tool
    dies-later      reports a dead worker at the second request, and leaves the request hanging
    stubborn        ignores SIGTERM and SIGINT
    family          has descendants that left its session and whose parent is gone

FAKE_PIDS names a file that gets the ids of all its processes, one a line.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from moet_vllm.events import Converted, ProcessEnded, emit

MODES = set(filter(None, os.environ.get("FAKE_MODE", "").split(",")))
SLEEP = "import signal, time; {}time.sleep(600)"
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


class Handler(BaseHTTPRequestHandler):
    requests = 0

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {})
        else:
            self.answer(200, {"object": "list", "data": [{"id": "fake"}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.requests += 1
        if "no-step" in MODES:
            self.answer(500, {"error": "EngineDeadError"})
            return
        if "dies-later" in MODES and Handler.requests > 1:
            lose_worker()
            time.sleep(600)
        if request.get("stream"):
            self.stream(request, chat="chat" in self.path)
        elif "messages" in request:
            self.answer(200, {"choices": [chat_choice(request)], "usage": usage(request)})
        else:
            choices = [{"index": 0, "text": "a", "finish_reason": "length"}]
            self.answer(200, {"choices": choices, "usage": usage(request)})

    def stream(self, request, chat):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        base = {"id": "x", "created": 1, "model": "fake", "object": "text_completion"}
        for _ in range(request["max_tokens"]):
            choice = {"delta": {"content": "ab"}} if chat else {"text": "ab"}
            self.event(base | {"choices": [{"index": 0, "finish_reason": None} | choice]})
            time.sleep(0.002)
        self.event(base | {"choices": [], "usage": usage(request)})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def answer(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):  # noqa: A002 - the base class's name
        pass


def chat_choice(request):
    """Call the first tool offered, unless asked about its result or in mode no-call."""
    message = {"role": "assistant", "content": "words"}
    if request.get("tools") and request["messages"][-1]["role"] == "user":
        name = request["tools"][0]["function"]["name"]
        call = {"name": name, "arguments": json.dumps({"symbol": "UX570"})}
        if "no-call" not in MODES:
            message["content"] = None
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": call}]
    return {"index": 0, "message": message, "finish_reason": "stop"}


def usage(request):
    prompt = request.get("prompt") or request["messages"][0]["content"]
    count = request["max_tokens"]
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
    }


def converted(rank, world):
    return Converted(
        rank=rank,
        world=world,
        tp_rank=rank,
        layers=3,
        experts=48,
        tensors=144,
        weights=4_718_592,
        bytes_before=2_654_784,
        bytes_after=1_327_104,
        bits_per_weight=2.25,
        codec="w2",
        source="nvfp4",
        peak_staged_bytes=1000,
        seconds=0.1,
    )


def lose_worker():
    emit(ProcessEnded("VllmWorker-1", 4242, -9, "SIGKILL", 0))


def record(pid):
    if "FAKE_PIDS" in os.environ:
        with open(os.environ["FAKE_PIDS"], "a") as file:  # noqa: PTH123
            file.write(f"{pid}\n")


def start_family():
    """Start a process that starts one in a session of its own and ends."""
    sleep = SLEEP.format(IGNORE if "stubborn" in MODES else "")
    parent = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True, "
        "stdout=subprocess.DEVNULL); "
        "print(child.pid, flush=True); import os; os._exit(0)"
    )
    command = [sys.executable, "-c", parent]
    grandchild = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    record(int(grandchild))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--additional-config", type=json.loads)
    options, _ = parser.parse_known_args()
    record(os.getpid())
    if "stubborn" in MODES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "family" in MODES:
        start_family()
    os.write(1, b"INFO Starting to load model\n")
    if "crash" in MODES:
        raise ValueError("layer 3 has no experts")
    if "suicide" in MODES:
        os.write(1, b"half a line")
        os.kill(os.getpid(), signal.SIGKILL)
    if "worker-dies" in MODES:
        lose_worker()
    if MODES & {"silent", "worker-dies"}:
        time.sleep(600)
    if "slow" in MODES:
        time.sleep(1)
    if "unconverted" not in MODES:
        emit(converted(0, 2 if "half" in MODES else 1))
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
