"""Run receipts: the facts that a run's folder proves, and their verification. No torch.

receipt   the facts, their differences from the request, and the comparison of a receipt with its folder
context   the machine, packages, environment and checkout of a run
"""
