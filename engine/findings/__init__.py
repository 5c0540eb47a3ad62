"""Findings: what went wrong in a run, its possible causes, and the experiments that told. No torch.

finding     the records of finding.json, what can be done to one, its canonical form and its seal
bundle      the folder of a finding, with copies of the run and of its tests, and LOG.md beside it
changes     what is done to a finding on disk, for every surface: begin, suspect, test, close
verify      hashes every byte and judges every test again
text        a finding in words, and its README.md; older: findings of the first version, read-only
"""
