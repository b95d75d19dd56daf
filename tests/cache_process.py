"""Run by test_cache.py: compiles a small model in a fresh process and says what the caches did.

Arguments: a JSON object with ``backend`` ("fp8pass" or "options") and ``options``.
"""

from __future__ import annotations

import json
import sys

import models
import torch
from torch._dynamo.utils import counters

import fp8pass


def main() -> None:
    request = json.loads(sys.argv[1])
    found = []
    for options in request["options"]:
        torch._dynamo.reset()
        counters.clear()
        before = len(fp8pass.reports())
        model, x = models.build(models.Pair, "static"), models.rows(3)
        if request["backend"] == "fp8pass":
            prefixed = {f"fp8pass.{name}": value for name, value in options.items()}
            function = torch.compile(model, backend=fp8pass.fp8pass_backend, options=prefixed)
        else:
            function = torch.compile(model, options=fp8pass.inductor_options(**options))
        with torch.no_grad():
            result = function(x)
        reports = fp8pass.reports()[before:]
        found.append(
            {
                "graph": {
                    kind: counters["inductor"][f"fxgraph_cache_{kind}"]
                    for kind in ("hit", "miss", "bypass")
                },
                "autograd": {
                    kind: counters["aot_autograd"][f"autograd_cache_{kind}"]
                    for kind in ("hit", "miss", "bypass")
                },
                "bits": models.digest(result),
                "distance": models.distance(result, models.reference(model, x)),
                "restored": [report.from_cache for report in reports],
                "hooks": [[g.hook for g in report.graphs] for report in reports],
                "sites": [[site.to_dict() for site in report.sites] for report in reports],
                "text": [report.table() for report in reports],
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
