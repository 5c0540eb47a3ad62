"""Findings: what went wrong in a run, its possible causes, and the tests that decide. No torch.

finding     the records of finding.json, the changes of a finding, its canonical form and its seal (a SHA-256 of it)
bundle      the folder of a finding, with copies of the run and of its tests, and its entry in LOG.md
changes     changes of a finding on disk, for commands, screens and agents: begin, suspect, test, close
verify      hashes every byte and judges every test again
text        a finding in words, and its README.md; older: findings of the first version, read-only
"""
