"""How far the cost profiles are off: held-out rows over several seeds, and shapes left out whole.

    python benchmarks/accuracy.py MEASUREMENTS.csv [MORE.csv ...] [--seeds 5] [--only OPERATION] [--leave-out WHAT]

Prints Markdown tables; `docs/accuracy.md` holds what they said for the shipped profiles.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np

from kvsim.cost.calibrate import HOLD_OUT_SHARE, MIN_ROWS, fit_group
from kvsim.cost.measurements import Group, load_measurements


def family(group: Group) -> str:
    """The line of the summary a fit belongs to."""
    key = group.key
    if key.op == "elementwise" or (key.op == "gemm" and key.kernel == "whole-layer"):
        return "GEMM-like (projections and row operations)"
    return f"{key.op} {key.kernel} {key.version}"


def held_out_errors(group: Group, seed: int) -> np.ndarray:
    """Relative errors of a fifth of the rows, predicted from the others."""
    order = np.random.default_rng(seed).permutation(len(group.latency_us))
    num_test = max(1, round(HOLD_OUT_SHARE * len(order)))
    test, train = group.take(order[:num_test]), group.take(order[num_test:])
    return fit_group(train).predict_us(test.columns) / test.latency_us - 1.0


def left_out(group: Group, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Errors when all rows with the same values of `names` are predicted from the other rows: corrected, and bare."""
    shapes = list(zip(*(group.columns[name] for name in names), strict=True))
    corrected, bare = [], []
    for shape in sorted(set(shapes)):
        inside = np.array([one == shape for one in shapes])
        train, test = group.take(np.flatnonzero(~inside)), group.take(np.flatnonzero(inside))
        if len(train.latency_us) < MIN_ROWS:
            return np.zeros(0), np.zeros(0)
        fit = fit_group(train)
        corrected.append(fit.predict_us(test.columns) / test.latency_us - 1.0)
        bare.append(fit.bare_us(test.columns) / test.latency_us - 1.0)
    return np.concatenate(corrected), np.concatenate(bare)


def line(name: str, errors: np.ndarray, spread: list[float]) -> str:
    """One row of the table, in per cent."""
    size = 100 * np.abs(errors)
    shares = " | ".join(f"{np.mean(size <= limit) * 100:.0f}" for limit in (15, 20, 25))
    seeds = f"{min(spread):.1f} to {max(spread):.1f}" if len(spread) > 1 else ""
    figures = f"{size.mean():.1f} | {seeds} | {100 * errors.mean():+.1f} | {size.max():.0f} | {shares}"
    return f"| {name} | {len(errors)} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--framework", default="vllm")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="one operation, such as all_reduce")
    parser.add_argument(
        "--leave-out", choices=("shape", "batch", "ctx_len"), help="instead of a fifth of the rows, all of one value"
    )
    args = parser.parse_args()
    for path in args.files:
        data = load_measurements(path)
        groups = [g for g in data.groups if g.key.framework == args.framework and len(g.latency_us) >= MIN_ROWS]
        groups = [g for g in groups if args.only in (None, g.key.op)]
        print(f"\n**{data.gpu}**\n")
        if args.leave_out:
            left_out_table(groups, args.leave_out)
        else:
            seed_table(groups, args.seeds)


def seed_table(groups: list[Group], num_seeds: int) -> None:
    """Held-out errors, pooled over the seeds; the spread is that of the mean absolute error over the seeds."""
    print("| operation | rows predicted | mean abs | over seeds | bias | worst | <= 15 % | <= 20 % | <= 25 % |")
    print("|---|---|---|---|---|---|---|---|---|")
    found: dict[str, list[list[np.ndarray]]] = defaultdict(lambda: [[] for _ in range(num_seeds)])
    for group in groups:
        for seed in range(num_seeds):
            errors = held_out_errors(group, seed)
            found[family(group)][seed].append(errors)
            if family(group).startswith("GEMM-like"):
                found[f"- {group.key.kind}"][seed].append(errors)
    for name, by_seed in found.items():
        pooled = [np.concatenate(parts) for parts in by_seed]
        print(line(name, np.concatenate(pooled), [float(100 * np.abs(e).mean()) for e in pooled]), flush=True)


def left_out_table(groups: list[Group], what: str) -> None:
    """Errors on shapes (n and k, or numbers of heads), batch sizes or contexts that were left out whole."""
    print("| operation | rows predicted | mean abs | bare form | bias | worst | <= 15 % | <= 20 % | <= 25 % |")
    print("|---|---|---|---|---|---|---|---|---|")
    for group in groups:
        if group.key.op not in ("gemm", "decode_attention", "prefill_attention", "mixed_attention"):
            continue
        shape = ("n", "k") if group.key.op == "gemm" else ("heads", "kv_heads")
        names = shape if what == "shape" else (what,)
        if not all(name in group.columns for name in names):
            continue
        corrected, bare = left_out(group, names)
        if len(corrected):
            text = line(family(group) if group.key.op != "gemm" else f"gemm {group.key.kernel}", corrected, [])
            print(text.replace("|  |", f"| {100 * np.abs(bare).mean():.1f} |", 1), flush=True)


if __name__ == "__main__":
    main()
