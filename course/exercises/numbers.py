"""Numbers that a cell asks for and does not compute: `check.measured(yours, "name")` compares with these."""

from course.teaching.check.exercise import NUMBERS

NUMBERS |= {
    "words_read": sum(range(4, 15)),  # 1: words in, by eleven steps of the loop
    "triangle": sum(range(6, 14)),  # 1: boxes computed in eight steps
    "repeated": 127 / 128,  # 1: of a pass over 128 tokens, what the pass over 127 had done before
    "ten_times": 11,  # 1: new tokens from which on the loop feeds ten times what a cache feeds
    "fed_with_cache": 6 + 23,  # 2: tokens fed to write 24 after a prompt of six
    "fed_in_eight": 6 + 7,  # 2: boxes computed in eight steps
    "at_least": 29_508_608 / 20e9,  # 2: seconds to read the workshop model's weights at 20 GB/s
    "read": 13.147 / 32 + 1.0737,  # 6: GB that an A100 reads for one token of 32 texts
    "unlike": -186.4,  # 9: KeyDiff's scores of one head of the workshop model, summed
}
