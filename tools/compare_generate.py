"""Compare ordinary decoding with transformers' `generate`, interleaved in one process.

A slow baseline would inflate every speedup that specbench publishes. For each prompt both decode the same
number of tokens greedily at batch 1, taking turns and swapping who goes first; what is compared is the
time from the first token to the last, and the whole call. The last line is the ratio of medians: above 1,
specbench is the faster one.

    python tools/compare_generate.py --model smollm2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from specbench import models, workloads
from specbench.engines.local import LocalEngine
from specbench.records import Request, SamplingParams, Schedule
from specbench.runtime.events import Finished


class Clock(BaseStreamer):  # type: ignore[misc]  # transformers is untyped
    """Notes when `generate` hands over each token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt_seen = False

    def put(self, value: Any) -> None:
        """Take a token; the first call hands over the prompt."""
        del value
        if self.prompt_seen:
            self.times.append(time.perf_counter())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing to do."""


def with_generate(model: Any, prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """Return seconds per token after the first, seconds of the call, and the output."""
    ids = torch.tensor([prompt])
    clock = Clock()
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        streamer=clock,
        pad_token_id=0,
    )
    total = time.perf_counter() - start
    return (clock.times[-1] - clock.times[0]) / (tokens - 1), total, out[0, len(prompt) :].tolist()


def with_specbench(engine: LocalEngine, prompt: list[int], tokens: int) -> tuple[float, float, list[int]]:
    """Return the same of ordinary decoding."""
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    events = list(engine.serve(Schedule((Request(0, tuple(prompt), params),), concurrency=1)))
    total = time.perf_counter() - start
    record = next(event.record for event in events if isinstance(event, Finished))
    spread = record.chunk_times[-1] - record.chunk_times[0]
    return spread / (tokens - 1), total, list(record.output_tokens)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    resolved = models.resolve(options.model)
    # Two copies: the engine puts its own attention into its model, and `generate` must keep its own.
    reference = models.load(resolved, dtype=options.dtype)
    ours = models.load(resolved, dtype=options.dtype)
    reference.model.generation_config.eos_token_id = None  # both decode the full length
    prompts = [p.render(ours.tokenizer) for p in workloads.load("novel").limited(options.prompts).prompts]
    width = max(map(len, prompts)) + options.tokens + 8
    engine = LocalEngine(ours.model, eos_ids=(), rows=1, width=width)
    engine.open("ordinary")
    with_generate(reference.model, prompts[0], 8)
    with_specbench(engine, prompts[0], 8)

    per_token: tuple[list[float], list[float]] = ([], [])
    whole: tuple[list[float], list[float]] = ([], [])
    ratios: list[float] = []
    same = 0
    turn = 0
    for _ in range(options.repeats):
        for prompt in prompts:
            results: dict[int, tuple[float, float, list[int]]] = {}
            for who in (0, 1) if turn % 2 == 0 else (1, 0):
                if who == 0:
                    results[0] = with_generate(reference.model, prompt, options.tokens)
                else:
                    results[1] = with_specbench(engine, prompt, options.tokens)
            turn += 1
            for who in (0, 1):
                per_token[who].append(results[who][0])
                whole[who].append(results[who][1])
            ratios.append(results[0][0] / results[1][0])
            same += results[0][2] == results[1][2]

    for name, times in (("ms per token", per_token), ("s per call", whole)):
        scale = 1000 if times is per_token else 1
        theirs, mine = (statistics.median(t) * scale for t in times)
        print(f"{name:14} generate {theirs:8.3f}   specbench {mine:8.3f}   ratio {theirs / mine:.3f}")
    print(f"identical outputs: {same} of {turn}")
    low, _, high = statistics.quantiles(ratios, n=4)
    middle = statistics.median(ratios)
    print(f"speed relative to generate, median of pairs [quartiles]: {middle:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
