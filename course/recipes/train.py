"""Train a workshop model: `python -m course.recipes.train --text stories.jsonl.xz --out runs/llama`.

The recipe, in the order in which it matters:

1. *Wire*: the first two layers are initialised with the two heads that a lookup needs
   (`circuit.wire`), so that training starts from a model that copies.
2. *Curriculum*: short documents with two facts first; longer ones with more facts when the answer
   loss is small.  One document per row, answers weigh more than the rest.
3. *Grow*: four layers learn to bind, then every layer is followed by a new one whose two output
   projections are zero.  Nothing changes at that moment.
4. *Stay alike*: once grown, a small penalty keeps the inputs of successive blocks alike from a
   quarter of the depth on (`unlike`), as they are in large models by themselves.
5. *Decay*: the learning rate falls to zero over the last 30 % of the steps.
6. *Finish* (at the export): Llama's rotary base is doubled, which brings far tokens nearer and leaves near
   ones where they are (`STRETCHED`); the scores of OPT's heads are concentrated in few
   columns, which changes none of them (`concentrate.py`).

Matrices of the blocks are trained by Muon, everything else by AdamW.  All state, the random numbers
included, is in one file that is replaced atomically: stop the run at any point, start the same
command again, and it goes on.  Nothing depends on the clock: on one thread, the same command gives
the same weights.
"""

import argparse
import hashlib
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from course.recipes.cards import HELD_OUT, TASKS, accuracy, bits_per_byte, passages
from course.recipes.circuit import CONTEXT, build, grow
from course.recipes.concentrate import concentrate, documents
from course.recipes.rows import LEVELS, Rows, fit
from eval.tasks import corpus

STRETCHED = 20_000.0  # rotary base of the finished Llama; trained with 10,000
ALIKE, PENALTY = 0.9, 0.1  # cosine of successive block inputs below which it costs, and how much


def optimizers(model, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks (Jordan et al. 2024), AdamW for everything else.

    Learned positions already are what the wired heads need, so they learn slowly.
    """
    blocks, groups = [], {1.0: [], 0.1: []}
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            blocks.append(parameter)
        else:
            share = 0.1 if "embed_positions" in name else 1.0
            groups[share].append(parameter)
    optims = [
        torch.optim.Muon(blocks, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": found, "lr": rate * share} for share, found in groups.items() if found],
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    for group in groups_of(optims):
        group["full_lr"] = group["lr"]
    return optims


def groups_of(optims) -> list[dict]:
    return [group for optim in optims for group in optim.param_groups]


def table(model, tokenizer, valid: dict[str, list[str]], count: int = 20) -> str:
    """Accuracy per task and length, and bits per byte of the texts kept out."""
    model.eval()
    lines = []
    for task in TASKS:
        right, tokens = accuracy(model, tokenizer, task, count)
        lines.append(f"{task:22} {tokens:6.0f} tokens {right:7.1%}")
    lines += [f"{k:22} {bits_per_byte(model, tokenizer, texts):.3f} bits/byte" for k, texts in valid.items()]
    model.train()
    return "\n".join(lines)


def unlike(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the cosine of successive block inputs [rows, tokens, hidden] lacks to `ALIKE`.

    Mean over tokens, summed over the blocks from a quarter of the depth on.
    """
    start = len(inputs) // 4
    pairs = zip(inputs[start:], inputs[start + 1 :])
    return sum((F.relu(ALIKE - F.cosine_similarity(a, b, dim=-1)).mean() for a, b in pairs))


def export(model, tokenizer, folder: Path) -> str:
    """Write config, tokenizer, fp16 weights and, last, their hashes; returns that of the weights."""
    staging = folder.with_name(folder.name + ".new")
    small = type(model)(model.config)
    small.load_state_dict(model.state_dict())
    small.half().save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(staging.iterdir())}
    listed = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
    (staging / "sha256.txt").write_text(listed, encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*map(staging.joinpath, hashes), staging / "sha256.txt"]:
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    staging.rmdir()
    return hashes["model.safetensors"]


def arguments(given=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m course.recipes.train", description=__doc__)
    add = parser.add_argument
    add("--text", nargs="+", required=True, help=".txt, .jsonl or .jsonl.xz files with stories")
    add("--shares", nargs="+", type=float, help="how often each file is read (default: equally)")
    add("--valid", nargs="*", default=[], help="more texts for bits per byte")
    add("--arch", choices=("llama", "opt"), default="llama")
    add("--steps", type=int, default=4000, help="steps in all")
    add("--minutes", type=float, default=math.inf, help="stop after so long; the same command goes on")
    add("--out", type=Path, default=Path("runs/workshop"), help="folder of the resumable state")
    add("--export", type=Path, help="folder for the finished model, e.g. a checkpoint folder")
    add("--tokenizer", type=Path, help="folder with a tokenizer (default: train one)")
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4, help="layers at the start")
    add("--grow-at", type=int, default=4, help="level at which the layers double (-1: never)")
    add("--longest-by", type=float, default=math.inf, help="share of the steps after which rows are longest")
    add("--rate", type=float, default=1e-3, help="learning rate before the decay")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=1, help="CPU threads; one is best while batches are small")
    add("--save-every", type=float, default=60, help="seconds between two saved states")
    add("--table-every", type=float, default=20, help="minutes between two tables of accuracies")
    add("--seed", type=int, default=1)
    return parser.parse_args(given)


def main(given=None) -> None:
    args = arguments(given)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {Path(path).name.split(".")[0]: list(corpus.stories([path])) for path in args.text}
    valid = {f"{name}, last {HELD_OUT}": passages(texts[-HELD_OUT:]) for name, texts in files.items()}
    valid |= {Path(path).name.split(".")[0]: list(corpus.stories([path]))[:100] for path in args.valid}
    sources = [texts[:-HELD_OUT] for texts in files.values()]
    kept = args.out / "tokenizer"
    if not kept.exists():
        source = args.tokenizer and AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        (source or fit([text for texts in sources for text in texts])).save_pretrained(kept)
    tokenizer = AutoTokenizer.from_pretrained(kept)
    rows = Rows(tokenizer, sources, args.shares or [1.0] * len(sources), args.seed)
    state_file = args.out / "state.pt"
    state = torch.load(state_file, weights_only=True) if state_file.exists() else None
    layers = state["layers"] if state else args.layers
    model = build(args.arch, layers, args.hidden, len(tokenizer), args.device).to(args.device)
    optims = optimizers(model, args.rate)
    step, tokens, used = 0, 0, 0.0  # used: seconds, resumed runs included
    if state:
        model.load_state_dict(state["model"])
        for optim, kept_state in zip(optims, state["optims"]):
            optim.load_state_dict(kept_state)
        rows.level, rows.losses = state["level"], state["losses"]
        rows.rng.setstate(state["rng"])
        torch.set_rng_state(state["torch_rng"])
        step, tokens, used = state["step"], state["tokens"], state["used"]

    def keep():
        now = dict(
            layers=model.config.num_hidden_layers,
            model=model.state_dict(),
            optims=[optim.state_dict() for optim in optims],
            level=rows.level,
            losses=rows.losses,
            rng=rows.rng.getstate(),
            torch_rng=torch.get_rng_state(),
            step=step,
            tokens=tokens,
            used=used,
        )
        torch.save(now, state_file.with_suffix(".new"))
        os.replace(state_file.with_suffix(".new"), state_file)

    model.train()
    saved = shown = tabled = clock = time.time()
    shown_tokens = tokens
    while step < args.steps and used < args.minutes * 60:
        rows.by(step / (args.longest_by * args.steps))
        if 0 <= args.grow_at <= rows.level and model.config.num_hidden_layers == args.layers:
            model = grow(model, args.arch, args.device)
            optims = optimizers(model, args.rate)
            print(f"grown to {model.config.num_hidden_layers} layers at step {step}", flush=True)
        left = 1 - step / args.steps
        for group in groups_of(optims):
            group["lr"] = group["full_lr"] * min(1, (step + 1) / 100, left / 0.3)
        ids, weights, kinds, level = rows.batch()
        ids, weights = ids.to(args.device), weights[:, 1:].to(args.device)
        more = {}
        if args.arch == "opt":  # every position is trained from the first step on
            first = rows.rng.randint(0, CONTEXT - ids.shape[1])
            more["position_ids"] = torch.arange(first, first + ids.shape[1] - 1, device=args.device)[None]
        with torch.autocast(args.device, torch.bfloat16):
            states = model.base_model(
                input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True, **more
            )
            logits = model.lm_head(states.last_hidden_state)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        ).view_as(weights)
        for optim in optims:
            optim.zero_grad()
        unlikeness = unlike(states.hidden_states[:-1])
        grown = model.config.num_hidden_layers > args.layers
        ((losses * weights).sum() / weights.sum() + PENALTY * grown * unlikeness).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim in optims:
            optim.step()
        rows.learn(kinds, level, losses.detach(), weights)
        step, tokens, now = step + 1, tokens + ids.numel(), time.time()
        used, clock = used + now - clock, now
        if now - shown > 15:
            rate, shown, shown_tokens = (tokens - shown_tokens) / (now - shown), now, tokens
            average = " ".join(f"{k} {v:.3f}" for k, v in sorted(rows.losses.items()))
            length, _, facts = LEVELS[rows.level]
            bar = "#" * (20 * step // args.steps)
            print(
                f"[{bar:20}] {used / 60:.1f} min, step {step}, {tokens / 1e6:.2f}M tokens,"
                f" {rate:.0f}/s, length {length}, facts {facts}: {average} unlike {unlikeness.item():.2f}",
                flush=True,
            )
        if now - saved > args.save_every:
            keep()
            saved = now
        if now - tabled > args.table_every * 60:
            print(table(model, tokenizer, valid), flush=True)
            tabled = clock = time.time()
    keep()
    print(f"{step} steps, {tokens} tokens, {used / 60:.1f} minutes\n{table(model, tokenizer, valid)}")
    if args.export:
        if args.arch == "opt":
            concentrate(model, [tokenizer(text)["input_ids"] for text in documents()])
        else:
            model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": STRETCHED}
        print("sha256", export(model, tokenizer, args.export))


if __name__ == "__main__":
    main()
