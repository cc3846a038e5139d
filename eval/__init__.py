"""The harness: accuracy through lm-eval, agreement with the full cache, speed, studies, and one report.

    python -m eval all                          workshop model, first-wave methods, local tasks
    python -m eval accuracy --model DIR_OR_HUB_ID --methods full h2o:budget=0.2 --tasks piqa
    python -m eval speed --suite wide           1k to 16k tokens on a wider random-weight model
    python -m eval report --out results/demo    tables, plots and the page again from what is stored

core/ makes and stores the cells of every measurement; accuracy/, speed/ and studies/ make numbers, report/
shows what is stored, reproduce/ makes the tables of this project's documents, tasks/ holds the local tasks of
lm-eval.
"""

PACKAGE = __name__  # eval in a checkout, kvlab_eval where kvlab is installed
PROGRAM = "python -m eval" if PACKAGE == "eval" else "kvlab eval"  # how people call it there
