"""Other engines beside ours: installed, run on the same workloads one after another, shown in one table."""
