"""Side by side against peers: each prints a table and, with --json, writes its figures."""
