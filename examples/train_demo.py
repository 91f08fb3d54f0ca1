"""Trains the demo model on the reference topics that come with Python.

    python examples/train_demo.py --out build/demo

writes `model.safetensors` (the weights of the best validation figure, averaged over recent steps, in bf16) and `figures.json` (what the model
card says). A few minutes on a GPU. The whole model runs through `kdaserve.chunk_kda`, which is differentiable on the backend `torch`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kdaserve.demo.corpus import Corpus, load_corpus
from kdaserve.demo.model import START, ByteLM, bits_per_byte

AVERAGE = 0.99
"""Share of the old weights in each step of the running average; averaged weights generalise better than the last ones."""


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    corpus = load_corpus()
    model = ByteLM(dropout=args.dropout).to(args.device)
    best, history = train(model, corpus, args)
    rounded = {name: w.to(torch.bfloat16) if w.ndim > 1 else w for name, w in best.state_dict().items()}
    best.load_state_dict(rounded)
    save_file({name: w.cpu().contiguous() for name, w in rounded.items()}, args.out / "model.safetensors")
    figures = {
        "held_out_bits_per_byte": bits_per_byte(best, corpus.held_out),
        "validation_bits_per_byte": bits_per_byte(best, corpus.validation),
        "bytes": {name: sum(map(len, part)) for name, part in corpus._asdict().items()},
        "corpus_sha256": corpus.digest,
        "parameters": sum(p.numel() for p in best.parameters()),
        "history": history,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"held-out {figures['held_out_bits_per_byte']:.4f} bits per byte")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=1254)
    parser.add_argument("--batch", type=int, default=32, help="windows a step")
    parser.add_argument("--length", type=int, default=512, help="bytes of a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train(model: ByteLM, corpus: Corpus, args: argparse.Namespace) -> tuple[ByteLM, list[dict[str, float]]]:
    """The averaged model at its best validation figure, and that figure over time."""
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    warm_up = min(100, args.steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, warm_up, args.steps))
    average = copy.deepcopy(model).eval().requires_grad_(False)
    best, best_bits, history = copy.deepcopy(average), math.inf, []
    start, losses = time.monotonic(), []
    for step, (tokens, targets) in enumerate(windows(corpus, args), 1):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        follow(average, model, min(AVERAGE, step / (step + 10)))
        losses.append(loss.detach())
        if step % args.evaluate_every == 0 or step == args.steps:
            bits, train_bits = bits_per_byte(average, corpus.validation), torch.stack(losses).mean().item() / math.log(2)
            history.append({"step": step, "train": train_bits, "validation": bits, "seconds": time.monotonic() - start})
            print(f"step {step:5}  train {train_bits:.3f}  validation {bits:.4f} bits per byte  {history[-1]['seconds']:.0f} s", flush=True)
            losses.clear()
            if bits < best_bits:
                best_bits = bits
                best.load_state_dict(average.state_dict())
    return best, history


def windows(corpus: Corpus, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """`args.steps` batches of random windows, `[batch, length]` tokens and the bytes that follow them."""
    text = torch.tensor(list(b"".join(START + piece for piece in corpus.train)), device=args.device)
    offsets = torch.arange(args.length + 1, device=args.device)
    for _ in range(args.steps):
        first = torch.randint(len(text) - args.length, (args.batch, 1), device=args.device)
        window = text[first + offsets]
        yield window[:, :-1], window[:, 1:]


def parameter_groups(model: ByteLM, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and gate parameters, which are no matrices, do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def learning_rate(step: int, warm_up: int, steps: int) -> float:
    """Share of the peak: linear warm-up, then half a cosine down to 2 %."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.51 + 0.49 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


@torch.no_grad()
def follow(average: ByteLM, model: ByteLM, keep: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)


if __name__ == "__main__":
    main()
