"""GPU: one command that measures on a GPU everything that a CPU cannot, in five stages.

    python -m eval gpu                  all stages, at most nine minutes, results/gpu/gpu.json
    python -m eval gpu --dry            the same in small on a CPU, with Triton interpreted
    python -m eval gpu --pack FOLDER    what a machine without a network needs; there: bash FOLDER/run

`plan.py` plans and supervises, `worker.py` is the process that measures, `bench.py` its clock and memory;
each stage is a module with `units(size)` and `measure(bench, ...)`: `step.py`, `flash.py` (the stage
attention), `link.py`, `headline.py` and `right.py`.
"""
