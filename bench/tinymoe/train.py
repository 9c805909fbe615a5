"""Train TinyMoE.

    python -m tinymoe.train prepare WORK --texts FOLDER     tokenizer, token streams, held-out rows
    python -m tinymoe.train run WORK --out FOLDER           training; all knobs are options

The same options on the same machine give the same weights: batches depend on the seed and the step
alone, and no operation adds in an order that varies.
"""

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from tinymoe.chat import render
from tinymoe.corpus import Texts, read_texts
from tinymoe.data import Batches, Plan, Streams, encode_texts, generator, held_out_rows
from tinymoe.evaluate import HeldOut, evaluate
from tinymoe.export import write_checkpoint
from tinymoe.model import TinyMoe
from tinymoe.optimizer import Optimizer
from tinymoe.shape import SMOKE, Shape
from tinymoe.tokenizer import read_tokenizer, train_tokenizer, write_tokenizer

__all__ = ["main", "prepare", "run"]

SKILLS = ("arithmetic", "needle", "tools", "chat")
TOKENIZER_SAMPLE = 3000  # conversations of each kind that the tokenizer sees


def prepare(work: Path, texts: dict[str, Texts], shape: Shape, files: int | None) -> None:
    """Train the tokenizer and encode the text; `files` keeps only so many of each kind."""
    work.mkdir(parents=True, exist_ok=True)
    kinds = ("python", "docs")
    train = {kind: texts["train"][kind][:files] for kind in kinds}
    held_out = {kind: texts["held_out"][kind][:files] for kind in kinds}
    random = Random("tokenizer")
    count = TOKENIZER_SAMPLE if files is None else 50
    samples = []
    for kind in SKILLS:
        make = generator(kind, train["docs"] or train["python"], 1000)
        for _ in range(count):
            item = make(random)
            samples.append("".join(p.text for p in render(item["messages"], item.get("tools"))))
    everything = [*train["python"][::4], *train["docs"][::2], *samples]
    tokenizer = train_tokenizer(everything, shape.vocabulary)
    write_tokenizer(tokenizer, work, shape.positions)
    for split, found in (("train", train), ("held_out", held_out)):
        for kind in kinds:
            stream = encode_texts(tokenizer, found[kind]) if found[kind] else np.zeros(0, np.uint16)
            Streams(work).write(f"{split}.{kind}", stream)
    filler = {
        split: (texts[split]["docs"][:400] or texts[split]["python"])[:400] for split in texts
    }
    (work / "filler.json").write_text(json.dumps(filler, ensure_ascii=False))


def held_out_sets(work: Path, seed: int, rows: int, long: int) -> dict[str, HeldOut]:
    """Return the held-out sets; `rows` conversations of each skill, text in rows of `long`."""
    tokenizer = read_tokenizer(work)
    filler = json.loads((work / "filler.json").read_text())["held_out"]
    sets = {}
    for kind in SKILLS:
        length = {"needle": long, "arithmetic": 64}.get(kind, min(long, 1024))
        make = generator(kind, filler, int(length * 2.2))
        sets[kind] = HeldOut(*held_out_rows(tokenizer, make, rows, length, seed))
    for kind in ("python", "docs"):
        stream = Streams(work)[f"held_out.{kind}"]
        count = min(rows, len(stream) // long)
        if count:
            tokens = stream[: count * long].astype(np.int64).reshape(count, long)
            # The first token of a row is given, not predicted.
            text = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in tokens)
            sets[kind] = HeldOut(tokens, None, text)
    return sets


def _lengths(args: argparse.Namespace) -> list[int]:
    """Return the row length of each step: `--phases 0.6:512,0.3:2048,0.1:4096`."""
    lengths: list[int] = []
    for phase in args.phases.split(","):
        share, length = phase.split(":")
        lengths += [int(length)] * round(float(share) * args.steps)
    return (lengths + [lengths[-1]] * args.steps)[: args.steps]


def _rate(step: int, args: argparse.Namespace) -> float:
    """Warm up, hold, then fall linearly to a hundredth over the last `--cooldown`."""
    left = (args.steps - step) / (args.steps * args.cooldown)
    return min((step + 1) / args.warmup, 1.0, 0.01 + 0.99 * left)


def _grid(step: int, args: argparse.Namespace) -> str:
    """Return what experts compute with at a step: NVFP4 late in training, W2 now and then."""
    if step < args.quantise_from * args.steps:
        return "full"
    return "w2" if args.w2_every and step % args.w2_every == 0 else "nvfp4"


def _loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def _balance(model: TinyMoe, loads: Tensor, rate: float, band: float) -> None:
    """Move the correction bias of experts outside `band` times their fair share back into it."""
    for moe, load in zip(model.moe_layers, loads, strict=True):
        fair = load.mean()
        step = (load < fair / band).float() - (load > fair * band).float()
        moe.gate.e_score_correction_bias.add_(rate * (step - step.mean()))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return `x[:, i + by]` at i, zeros at the end."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1).flatten()


def digest(model: TinyMoe) -> str:
    """Return the sha256 of all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _batches(data: Batches, workers: int, resumed: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(data, range(resumed, len(data))),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=8 if workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return iter(loader)


class _Step:
    """One training step; on a GPU, a CUDA graph for each row length, after a few plain steps.

    Launching the step's two thousand kernels one by one would take longer than running them.
    """

    PLAIN = 3

    def __init__(self, model: TinyMoe, optimizer: Optimizer, args: argparse.Namespace) -> None:
        self.model, self.optimizer, self.args = model, optimizer, args
        self.device = model.lm_head.weight.device
        self.cuda = self.device.type == "cuda"
        self.scale = torch.zeros((), device=self.device)
        self.loss = torch.compile(_loss) if self.cuda else _loss
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.inputs: dict[int, tuple[Tensor, Tensor]] = {}
        self.counts: Counter[tuple[int, str]] = Counter()
        self.graphs: dict[tuple[int, str], tuple[Any, tuple[Tensor, Tensor]]] = {}

    def _plain(self, tokens: Tensor, weights: Tensor, experts: str) -> tuple[Tensor, Tensor]:
        model = self.model
        hidden, drafted, loads = model(tokens, experts)
        loss = self.loss(model.logits(hidden), _shifted(tokens, 1), _shifted(weights, 1))
        draft = self.loss(model.logits(drafted), _shifted(tokens, 2), _shifted(weights, 2))
        (loss + self.args.mtp_weight * draft).backward()
        self.optimizer.step(self.scale)
        _balance(model, loads, self.args.balance, self.args.band)
        return loss.detach(), draft.detach()

    def __call__(self, batch: Any, experts: str, scale: float) -> tuple[Tensor, Tensor]:
        """Train on a batch at `scale` times the peak rates; return both losses."""
        if not self.cuda:
            self.scale.fill_(scale)
            return self._plain(batch.tokens, batch.weights, experts)
        length = batch.tokens.shape[1]
        if length not in self.inputs:
            self.inputs[length] = batch.tokens.to(self.device), batch.weights.to(self.device)
        tokens, weights = self.inputs[length]
        key = length, experts
        self.counts[key] += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            tokens.copy_(batch.tokens, non_blocking=True)
            weights.copy_(batch.weights, non_blocking=True)
            self.scale.fill_(scale)
            if self.counts[key] > self.PLAIN:
                if key not in self.graphs:
                    self.graphs[key] = self._capture(tokens, weights, experts)
                graph, found = self.graphs[key]
                graph.replay()
            else:
                found = self._plain(tokens, weights, experts)
        torch.cuda.current_stream().wait_stream(self.stream)
        return found

    def _capture(self, tokens: Tensor, weights: Tensor, experts: str) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The loader's thread pins memory meanwhile, which a capture in global mode forbids.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode=mode):
            found = self._plain(tokens, weights, experts)
        return graph, found


def run(work: Path, out: Path, shape: Shape, args: argparse.Namespace) -> TinyMoe:
    """Train and write model.pt and log.jsonl to `out`."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    # Strictly: where PyTorch may only warn, it takes the faster order of additions in attention.
    torch.use_deterministic_algorithms(args.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(args.seed)
    out.mkdir(parents=True, exist_ok=True)

    def report(**found: Any) -> None:
        with (out / "log.jsonl").open("a") as log:
            log.write(json.dumps(found) + "\n")
        print(
            {
                k: round(v, 4) if isinstance(v, float) else v
                for k, v in found.items()
                if k != "routing"
            },
            flush=True,
        )

    started = time.monotonic()
    model = TinyMoe(shape)
    if args.start:
        model.load_state_dict(torch.load(args.start, map_location="cpu"))
    model.to(device)
    streams = {kind: Streams(work)[f"train.{kind}"] for kind in ("python", "docs")}
    filler = json.loads((work / "filler.json").read_text())["train"]
    plan = Plan(tokens=args.tokens, text_share=args.text_share, docs_share=args.docs_share)
    data = Batches(work, streams, filler, plan, args.seed).schedule(_lengths(args))
    sets = held_out_sets(work, args.seed, args.rows, max(data.lengths[-1] // 2, 256))
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate, args.decay, cuda)
    train_step = _Step(model, optimizer, args)
    if cuda:
        torch._dynamo.config.cache_size_limit = 64
        for layer in model.model["layers"]:
            layer.before = torch.compile(layer.before, dynamic=False)
            layer.after = torch.compile(layer.after, dynamic=False)
    report(
        event="start",
        seconds=time.monotonic() - started,
        parameters=sum(p.numel() for p in model.parameters()),
        streams={k: len(v) for k, v in streams.items()},
        options={k: str(v) for k, v in vars(args).items() if k != "function"},
    )
    begun, window = time.monotonic(), 0.0
    for step, batch in enumerate(_batches(data, args.workers, 0)):
        loss, draft = train_step(batch, _grid(step, args), _rate(step, args))
        last = step + 1 == args.steps
        if step % args.report == 0 or last:
            now = time.monotonic()
            report(
                event="step",
                step=step,
                loss=loss.item(),
                draft=draft.item(),
                seconds=now - begun,
                rate=(step * args.tokens) / (now - begun),
                recent=args.report * args.tokens / (now - window) if window else 0.0,
            )
            window = time.monotonic()
        if (step and step % args.evaluate == 0) or last:
            for experts in ("nvfp4", "w2") if args.w2_every else ("nvfp4",):
                found = evaluate(model, sets, experts, args.tokens)
                report(event="evaluation", step=step, experts=experts, **found)
            window = 0.0
        late = args.minutes and time.monotonic() - started > 60 * args.minutes
        if last or late:
            break
    report(event="end", step=step, seconds=time.monotonic() - started, sha256=digest(model))
    state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
    checkpoint = write_checkpoint(state, shape, out, work)
    report(event="export", sha256=checkpoint)
    if args.split:  # half precision is enough for files that must stay small
        state = {k: v.half() if v.numel() > 4096 else v for k, v in state.items()}
        names = list(state)
        for part in range(args.split):
            chosen = {k: state[k] for k in names[part :: args.split]}
            torch.save(chosen, out / f"model.{part}.pt")
    else:
        torch.save(state, out / "model.pt")
    return model


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    add = parser.add_argument
    add("--seed", type=int, default=1)
    add("--steps", type=int, default=6000)
    add("--tokens", type=int, default=131072, help="tokens a step")
    add("--phases", default="0.55:512,0.35:2048,0.1:4096", help="SHARE:ROW_LENGTH,...")
    add("--minutes", type=float, default=0.0, help="stop early (0: never)")
    add("--warmup", type=int, default=100)
    add("--cooldown", type=float, default=0.5)
    add("--muon-rate", type=float, default=0.02)
    add("--adam-rate", type=float, default=0.004)
    add("--decay", type=float, default=0.05)
    add("--mtp-weight", type=float, default=0.3)
    add("--balance", type=float, default=0.002, help="step of the correction bias")
    add("--band", type=float, default=3.0, help="fair share times or over this is left alone")
    add("--quantise-from", type=float, default=0.6, help="share of steps before the NVFP4 grid")
    add("--w2-every", type=int, default=0, help="of the late steps, one in so many through W2")
    add("--text-share", type=float, default=0.5)
    add("--docs-share", type=float, default=0.12)
    add("--rows", type=int, default=256, help="held-out conversations of each skill")
    add("--report", type=int, default=50)
    add("--evaluate", type=int, default=500)
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True)
    add("--workers", type=int, default=0)
    add("--start", type=Path, help="weights to start from")
    add("--split", type=int, default=0, help="write fp16 weights in so many files")


def main(argv: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("prepare")
    command.add_argument("work", type=Path)
    command.add_argument("--texts", type=Path, required=True)
    command.add_argument("--smoke", action="store_true")
    command.set_defaults(function="prepare")
    command = commands.add_parser("run")
    command.add_argument("work", type=Path)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--smoke", action="store_true")
    command.set_defaults(function="run")
    options(command)
    args = parser.parse_args(argv)
    shape = SMOKE if args.smoke else Shape()
    if args.function == "prepare":
        prepare(args.work, read_texts(args.texts), shape, 40 if args.smoke else None)
    else:
        run(args.work, args.out, shape, args)


if __name__ == "__main__":
    main()
