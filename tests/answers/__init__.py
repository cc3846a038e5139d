"""What learners answer, written as they write it: three right answers for every exercise, and wrong ones.

The key holds a table of wrong functions for each exercise, which test_check.py goes through. Here are wrong
answers that are none of these, as lines of code, with a part of the sentence that each must get. One file for
each chapter.
"""

from . import ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09

CHAPTERS = (ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09)
RIGHT = {name: bodies for chapter in CHAPTERS for name, bodies in chapter.RIGHT.items()}
WRONG = {name: rows for chapter in CHAPTERS for name, rows in chapter.WRONG.items()}
