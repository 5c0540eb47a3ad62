"""What was learnt, so that it can be checked: whys with their evidence, bundles, receipts. No torch."""
