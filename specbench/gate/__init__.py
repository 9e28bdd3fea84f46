"""A run against a stored baseline: did the counts change, does the audit still hold?"""
