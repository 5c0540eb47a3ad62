"""The page of runs: a server on 127.0.0.1 that shows run folders live in a browser, and changes nothing."""
