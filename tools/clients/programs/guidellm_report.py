"""Print the counts of speculation in guidellm's report of the first benchmark."""

import json
from collections import Counter
from pathlib import Path

requests = json.loads(Path("report.json").read_text())["benchmarks"][0]["requests"]["successful"]
counts = Counter()
for request in requests:
    found = request["response_metrics"]["speculative_decoding"]
    counts.update(
        {name: value for name, value in found.items() if name.startswith("num_") and name != "num_spec_tokens"}
    )
print(f"{len(requests)} requests:", dict(counts))
