"""InfiniGen's published speeds (Lee et al. 2024), each beside ours.

An experiment returns {"rows": [...]} and what else is shown.
"""
