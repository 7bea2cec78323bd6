"""The plumbing of the recipes: one job per file, values in, values out. Copy the folder; rename it if you
like.
"""
