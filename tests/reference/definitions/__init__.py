"""Definitions: every technique once more, in the plainest words, for tests to hold the real ones against."""
