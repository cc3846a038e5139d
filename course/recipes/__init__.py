"""Profiles of methods that are trained: the gates of duo, the guesses of kvzap."""
