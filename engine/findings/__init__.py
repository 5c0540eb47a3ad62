"""What was learnt, so that it can be checked: whys with their evidence, bundles, receipts. No torch.

finding     the records of finding.json, its one form and its seal
capture     taking evidence from a run, a flip, a file, a command or a person; logs: lines and metrics;
            context: what is captured beside a run; redact: no secret is kept
kinds       what differs between kinds of evidence, one row each
rules       E-WHY-001 and the others, one row each
whys        what can be done with a finding, as a value; changes: the same on disk, for every surface
bundle      the folder of a finding, and LOG.md beside it; verify: every byte, locator and rule again
text        a finding in words, and its README.md; chart: kept figures as SVG; report: one HTML file
receipt     what a run's folder proves of it; prior: records of the system before this one
"""
