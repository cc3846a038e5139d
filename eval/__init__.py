"""The harness: accuracy through lm-eval, agreement with the full cache, speed, and one report.

    python -m eval all                          workshop model, first-wave methods, local tasks
    python -m eval accuracy --model DIR_OR_HUB_ID --methods full h2o:budget=0.2 --tasks piqa
    python -m eval speed --suite wide           1k to 16k tokens on a wider random-weight model
    python -m eval report --out results/demo    tables, plots and the page again from what is stored

`accuracy.py` scores through the cache, `agreement.py` compares with the full cache, `speed.py` times,
`results.py` stores, `report.py` shows; `workers.py` runs cells in processes, `machine.py` says where.
"""
