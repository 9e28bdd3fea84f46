"""The in-process engine's machinery: slot cache, model runner, step loop, stopwatch and protocols."""
