"""Run receipts: the facts that a run's folder proves, and their verification. No torch.

receipt   the facts, their differences from what was asked, and the comparison of a receipt with its folder
context   the machine, packages, environment and checkout that a run was made with
"""
