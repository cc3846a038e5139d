"""The measurements of InfiniGen (Lee et al. 2024), each beside the published number.

An experiment takes the study (its models, its limit) and returns {"rows": [...]} and what else is shown.
"""
