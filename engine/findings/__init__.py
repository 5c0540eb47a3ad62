"""Findings: chains of whys with checkable evidence, their bundles on disk, and run receipts. No torch.

finding     the records of finding.json, its canonical form and its seal
capture     captures evidence from a run, a flip, a file, a command or a person; logs: lines and metrics;
            context: what is captured beside a run; redact: removes secrets
kinds       what differs between kinds of evidence, one row each
rules       E-WHY-001 and the others, one row each
whys        operations on a finding as a value; changes: the same operations on disk, for every surface
bundle      the folder of a finding, and LOG.md beside it; verify: re-checks every byte, locator and rule
text        a finding in words, and its README.md; chart: figures as SVG; report: one HTML file
receipt     the facts that a run's folder proves; prior: imports records of the predecessor system
"""
