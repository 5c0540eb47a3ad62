"""Known defects, planted on purpose: for `engine drill`, for tests of what should notice them, and for
nothing else. No other part of the engine imports this package.
"""
