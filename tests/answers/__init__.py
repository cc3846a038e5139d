"""Right answers as learners write them, three or more for every exercise. One file for each chapter."""

from . import ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09

CHAPTERS = (ch01, ch02, ch03, ch04, ch05, ch06, ch07, ch08, ch09)
RIGHT = {name: bodies for chapter in CHAPTERS for name, bodies in chapter.RIGHT.items()}
