"""Train the demo model from the standard library's sources: `python models/train_demo.py --minutes 60`.

Writes models/demo (the Hugging Face folder) and models/.train (checkpoints, ignored by git). `--resume` goes
on from the last checkpoint, `--eval-only` scores models/demo, `--smoke` runs every part in seconds.
SIGTERM lets the learning rate fall, then exports and evaluates what there is.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from recipe.batches import encode_documents
from recipe.corpus import Corpus, SourceFile, load_corpus
from recipe.evaluation import EVAL_FILE, Score, evaluate
from recipe.export import export_model, load_model
from recipe.network import Llama, Shape
from recipe.progress import Progress, say
from recipe.schedule import Schedule
from recipe.tokenizer import save_tokenizer, train_tokenizer
from recipe.training import Settings, Trainer
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: what to train, on how much, for how long, and where to."""

    shape: Shape
    corpus: Corpus
    schedule: Schedule
    settings: Settings
    folder: Path
    work: Path


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _arguments(argv)
    torch.manual_seed(1)
    if args.eval_only:
        rescore(args.out)
        return
    plan = smoke_plan(args.work, load_corpus()) if args.smoke else full_plan(args)
    trainer = make_trainer(plan)
    if args.resume:
        trainer.resume()
        if trainer.schedule.is_done:
            trainer.schedule = trainer.schedule.extended(60 * args.minutes)
    train(plan, trainer, early_export_s=60 * args.early_export_minutes)


def train(plan: Plan, trainer: Trainer, *, early_export_s: float) -> Score:
    """Train to the end of the schedule, export, score what was exported."""
    trainer.run(Progress(every_s=10.0), lambda: export_model(trainer.model, plan.folder), early_export_s)
    trainer.save()
    export_model(trainer.model, plan.folder)
    score = score_folder(
        plan.folder,
        plan.corpus,
        train_minutes=trainer.schedule.active_s / 60,
        train_tokens=trainer.counts.tokens,
    )
    report(score, plan.folder)
    return score


def make_trainer(plan: Plan) -> Trainer:
    """Tokenizer (reused where the folder has one), documents, network."""
    tokenizer = make_tokenizer(plan)
    documents = encode_documents(tokenizer, plan.corpus)
    say(
        f"{len(plan.corpus.train)} files, {plan.corpus.train_bytes / 1e6:.1f} MB, "
        f"{sum(map(len, documents)) / 1e6:.2f}M tokens; held out: {len(plan.corpus.held_out)} files, "
        f"{plan.corpus.held_out_bytes / 1e3:.0f} kB"
    )
    plan.work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Trainer(
        Llama(plan.shape), documents, plan.schedule, plan.settings, plan.work / "checkpoint.pt", device
    )


def make_tokenizer(plan: Plan) -> Tokenizer:
    """Return the folder's tokenizer, trained first where it has none of this size."""
    path = plan.folder / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() == plan.shape.vocab_size:
            return tokenizer
    tokenizer = train_tokenizer((f.text for f in plan.corpus.train), plan.shape.vocab_size)
    save_tokenizer(tokenizer, plan.folder, plan.shape.context_len)
    return tokenizer


def score_folder(folder: Path, corpus: Corpus, *, train_minutes: float, train_tokens: int) -> Score:
    """Score the saved checkpoint, not the network in memory."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_model(folder)
    return evaluate(model, tokenizer, corpus.held_out, train_minutes=train_minutes, train_tokens=train_tokens)


def rescore(folder: Path) -> None:
    """Score `folder` again on this Python's held-out files; what its training took stays as recorded."""
    old = json.loads((folder / EVAL_FILE).read_text())
    score = score_folder(
        folder, load_corpus(), train_minutes=old["train_minutes"], train_tokens=old["train_tokens"]
    )
    report(score, folder)


def report(score: Score, folder: Path) -> None:
    """Write eval.json and say both numbers."""
    score.save(folder)
    say(
        f"held-out: {score.held_out_files} files, {score.held_out_bytes} bytes\n"
        f"model   : {score.model_bits_per_byte:.4f} bits per byte\n"
        f"xz -9e  : {score.xz_bits_per_byte:.4f} bits per byte"
    )


def full_plan(args: argparse.Namespace) -> Plan:
    """Plan the demo model."""
    on_gpu = torch.cuda.is_available()
    settings = Settings(
        tokens_per_step=65536 if on_gpu else 4096,
        short_row_len=512,
        cooldown_s=60 * args.cooldown_minutes,
        checkpoint_every_s=300,
        is_compiled=not args.no_compile,
        num_threads=args.threads,
    )
    return Plan(Shape(), load_corpus(), Schedule(60 * args.minutes), settings, args.out, args.work)


def smoke_plan(work: Path, corpus: Corpus) -> Plan:
    """Plan a tiny model on a few files for a second, in a folder of its own."""
    shape = Shape(512, 32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=72, context_len=64)
    small = Corpus(_smallest(corpus.train, 40), _smallest(corpus.held_out, 4))
    settings = Settings(512, 32, cooldown_s=0, checkpoint_every_s=1e9, is_compiled=False, num_threads=1)
    return Plan(shape, small, Schedule(1.0), settings, work / "smoke", work / "smoke")


def _smallest(files: list[SourceFile], count: int) -> list[SourceFile]:
    """Choose from the larger three quarters: the smallest files are empty but for a comment."""
    return sorted(files, key=lambda f: f.num_bytes)[len(files) // 4 :][:count]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="training time; stops do not count")
    parser.add_argument("--cooldown-minutes", type=float, default=4, help="time to finish in after SIGTERM")
    parser.add_argument(
        "--early-export-minutes", type=float, default=math.inf, help="export once, this early"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=HERE / "demo")
    parser.add_argument("--work", type=Path, default=HERE / ".train")
    parser.add_argument("--resume", action="store_true", help="go on; a finished run for --minutes more")
    parser.add_argument("--no-compile", action="store_true", help="starts at once, runs slower")
    parser.add_argument("--eval-only", action="store_true", help="score the folder, train nothing")
    parser.add_argument("--smoke", action="store_true", help="every part, tiny, in seconds")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
