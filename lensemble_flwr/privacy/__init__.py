"""Update-level differential privacy: mechanism, accounting, ledger and claims. Pure but for the ledger's files.

Nothing is imported here: the submodules are the interface, and the accountants' backends are slow to load.
"""
